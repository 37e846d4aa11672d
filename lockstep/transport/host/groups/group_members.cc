#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/monotonic_ns.h>
#include <lockstep/base/text/format_duration.h>
#include <lockstep/rendezvous/exit_status_table.h>
#include <lockstep/transport/host/groups/group_members.h>
#include <lockstep/transport/host/groups/membership_agreement.h>

namespace lockstep::transport {
namespace {

using layout::ControlBlock;
using layout::kMaxRanks;

constexpr size_t round_up_to_line(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

/// What lies between the control block and the payloads; zero at the start, like the block.
size_t words_bytes(int size) {
  return round_up_to_line(size * (sizeof(uint8_t) + sizeof(uint64_t)) + sizeof(uint64_t));
}

size_t block_bytes(int size) {
  size_t bytes = sizeof(ControlBlock) + words_bytes(size) + 2 * layout::kPayloadBytes;
  if (size > layout::kFlatRanks) bytes += 2 * layout::kPartialBytes + 2 * layout::kPayloadBytes;
  return bytes;
}

}  // namespace

// ---- opening and closing

GroupMembers::View GroupMembers::view_of(std::byte* block) const {
  std::byte* words = block + sizeof(ControlBlock);
  View view;
  view.block = reinterpret_cast<ControlBlock*>(block);
  view.inbox = reinterpret_cast<std::atomic<uint64_t>*>(words);
  view.closed = reinterpret_cast<std::atomic<uint8_t>*>(words + members_.size() * sizeof(uint64_t));
  view.payloads = words + words_bytes(size());
  return view;
}

GroupMembers::GroupMembers(std::shared_ptr<HostTransport> transport, std::vector<int> members)
    : transport_(std::move(transport)), members_(std::move(members)) {
  TORCH_CHECK_VALUE(members_.size() <= kMaxRanks, "a group on one host has at most ", kMaxRanks,
                    " ranks, not ", members_.size());
  auto own = std::find(members_.begin(), members_.end(), transport_->rank());
  TORCH_INTERNAL_ASSERT(own != members_.end());
  rank_ = static_cast<int>(own - members_.begin());
}

GroupMembers::OwnBlock::OwnBlock(HostTransport& transport, int most_members)
    : arena_(transport.shared_arena()), memory_(arena_->allocate(block_bytes(most_members))) {
  // Flags must be zero before a peer learns the address; payloads need not be, and their pages stay
  // untouched.
  std::memset(memory_, 0, sizeof(ControlBlock) + words_bytes(most_members));
  word_ = pack_reference(*arena_->find(memory_, block_bytes(most_members)));
}

std::shared_ptr<GroupMembers> GroupMembers::open(std::shared_ptr<HostTransport> transport,
                                                 std::vector<int> members, const AddressExchange& exchange,
                                                 const Deadline& deadline) {
  std::shared_ptr<GroupMembers> group(new GroupMembers(std::move(transport), std::move(members)));
  const OwnBlock own(*group->transport_, group->size());
  group->own_block_ = own.memory_;
  group->map_blocks(exchange(own.word()), deadline);
  return group;
}

std::shared_ptr<GroupMembers> GroupMembers::open(std::shared_ptr<HostTransport> transport,
                                                 std::vector<int> members, const OwnBlock& own,
                                                 const std::vector<uint64_t>& words,
                                                 const Deadline& deadline) {
  std::shared_ptr<GroupMembers> group(new GroupMembers(std::move(transport), std::move(members)));
  group->own_block_ = own.memory_;
  group->map_blocks(words, deadline);
  return group;
}

void GroupMembers::map_blocks(const std::vector<uint64_t>& words, const Deadline& deadline) {
  TORCH_INTERNAL_ASSERT(words.size() == members_.size());
  for (int rank = 0; rank < size(); ++rank) {
    std::byte* block = rank == rank_ ? own_block_
                                     : transport_->address(members_[rank], unpack_reference(words[rank]),
                                                           deadline, block_bytes(size()));
    views_.push_back(view_of(block));
    views_.back().place = unpack_reference(words[rank]);
  }
  transport_->add_group(this);
}

GroupMembers::~GroupMembers() {
  if (transport_->in_forked_child()) return;
  if (views_.size() != members_.size()) {
    // open() did not get through. Others may have this block, or learn of it yet, so its memory is not used
    // again; they are not to wait for this rank.
    if (own_block_ == nullptr) return;
    view_of(own_block_).block->left.value.store(1, std::memory_order_release);
    publish_fence();
    for (auto& view : views_) view.block->doorbell.ring();
    return;
  }
  transport_->remove_group(this);
  leave();
  for (auto& view : views_) view.closed[rank_].store(1, std::memory_order_release);
  // A member's memory may be used again once no rank can read or write it any more: all have closed, or
  // ended.
  auto unused = [transport = transport_.get(), own = views_[rank_].closed, members = members_] {
    for (size_t rank = 0; rank < members.size(); ++rank) {
      if (own[rank].load(std::memory_order_acquire) == 0 && !transport->has_ended(members[rank]))
        return false;
    }
    return true;
  };
  auto release = [arena = transport_->shared_arena(), block = own_block_, releases = std::move(releases_)] {
    for (const auto& also : releases) also();
    arena->deallocate(block);
  };
  transport_->retire(std::move(unused), std::move(release));
}

bool GroupMembers::has_left(int rank) const {
  return block(rank).left.value.load(std::memory_order_acquire) != 0;
}

void GroupMembers::leave() {
  // Release: a rank that sees it also sees that the last operation's flags are set.
  block(rank_).left.value.store(1, std::memory_order_release);
  publish_fence();
  ring(0, size());
  for (int rank = 0; rank < size(); ++rank) {
    block(rank).messages.notify();
    block(rank).recovery.doorbell.ring();
  }
}

void GroupMembers::record_wait_for(std::optional<RecordedWait>& record, int transport_rank, int owner,
                                   const void* word, uint64_t value, int64_t began_ns) const {
  const View& view = views_[owner];
  const auto offset = static_cast<const std::byte*>(word) - reinterpret_cast<const std::byte*>(view.block);
  if (began_ns == 0) began_ns = record ? record->since_ns() : monotonic_ns();
  record.emplace(transport_->wait_records(), transport_rank, members_[owner],
                 MemoryReference{view.place.segment, view.place.offset + static_cast<uint64_t>(offset)},
                 value, began_ns);
}

void GroupMembers::release_after_close(std::function<void()> release) {
  std::lock_guard lock(releases_mutex_);
  releases_.push_back(std::move(release));
}

// ---- waking

void GroupMembers::ring(int first, int last) const {
  for (int rank = first; rank < last; ++rank) block(rank).doorbell.ring();
}

void GroupMembers::wake_waiters() const {
  block(rank_).doorbell.ring_now();
  block(rank_).messages.notify();
  block(rank_).recovery.doorbell.ring_now();
}

// ---- the outcome

std::optional<Decision> GroupMembers::aborted() const {
  const uint64_t word = outcome().abort.load(std::memory_order_acquire);
  if (word == 0) return std::nullopt;
  return unpack_decision(word - 1);
}

void GroupMembers::abort(const std::string& reason) {
  std::lock_guard lock(outside_mutex_);
  if (!reason.empty() && !aborted()) {
    const std::string whole = transport_->describe(members_[rank_]) + " " + reason;
    auto& text = block(rank_).outside_failure.text;
    whole.copy(text.data(), text.size() - 1);
  }
  abort_as({0, static_cast<uint64_t>(FailureKind::kAborted), members_[rank_], rank_});
}

void GroupMembers::abort_as(const Decision& cause) {
  uint64_t current = outcome().abort.load(std::memory_order_acquire);
  Decision first;
  do {
    first = current == 0 ? cause : unpack_decision(current - 1);
    // What came first stays, of earlier operations, too: a member that has failed with it aborts the group as it ends.
    first.sequence = std::min(first.sequence, cause.sequence);
    // Release: the text of fail_from_outside().
  } while (
      !outcome().abort.compare_exchange_weak(current, pack_decision(first) + 1, std::memory_order_acq_rel));
  tell_failure();
}

void GroupMembers::fail_from_outside(const GroupFailure& failure) {
  std::lock_guard lock(outside_mutex_);
  if (!aborted()) {
    auto& text = block(rank_).outside_failure.text;
    failure.text.copy(text.data(), text.size() - 1);
  }
  abort_as({failure.sequence, static_cast<uint64_t>(failure.kind), failure.culprit, rank_});
}

const char* GroupMembers::outside_text() const {
  const auto abort = aborted();
  if (!abort) return nullptr;
  // Something else may have been decided before the abort was seen.
  const Decision decided = decision();
  if (decided.is_failure() && (decided.kind != abort->kind || decided.culprit != abort->culprit))
    return nullptr;
  const bool by_itself =
      static_cast<FailureKind>(abort->kind) == FailureKind::kAborted && abort->culprit == members_[abort->by];
  const char* text = block(abort->by).outside_failure.text.data();
  return by_itself && *text == '\0' ? nullptr : text;
}

void GroupMembers::fail(FailureKind kind, int culprit, uint64_t sequence) {
  if (outcome::decide(outcome(), {sequence, static_cast<uint64_t>(kind), culprit, rank_})) tell_failure();
}

void GroupMembers::tell_failure() const {
  publish_fence();
  ring(0, size());
  for (int rank = 0; rank < size(); ++rank) block(rank).messages.notify();
}

std::string GroupMembers::describe(const std::vector<int>& ranks) const {
  std::vector<int> translated;
  for (const int rank : ranks) translated.push_back(members_[rank]);
  return transport_->describe(translated);
}

std::string GroupMembers::describe_timeout(const Decision& decided, const std::vector<int>& late,
                                           std::chrono::nanoseconds timeout, bool to_others) const {
  std::ostringstream text;
  const bool own = decided.by == rank_ && !to_others;
  const bool cause_is_late =
      std::any_of(late.begin(), late.end(), [&](int rank) { return members_[rank] == decided.culprit; });
  if (own) {
    text << "timed out after " << format_duration(timeout);
  } else {
    text << describe({decided.by}) << " timed out";
  }
  text << " waiting for ";
  if (late.empty() || cause_is_late) {
    text << transport_->describe(decided.culprit);
  } else {
    text << describe(late) << ", for which " << transport_->describe(decided.culprit) << " is the cause";
  }
  // The rank that has decided has asked the culprit's host how it is; this one has not.
  const bool found_stopped = transport_->has_found_stopped(members_[decided.by], decided.culprit);
  if (decided.by != rank_ && !transport_->is_here(decided.culprit)) {
    transport_->cause_of_waiting({decided.culprit});
  }
  const bool is_stopped = transport_->is_stopped(decided.culprit);
  if (found_stopped || is_stopped) {
    // What another host has said of its action holds as long as what it has said of its stop.
    text << ", which is stopped" << (is_stopped ? transport_->in_action(decided.culprit) : "")
         << " (by SIGSTOP, SIGTSTP or a debugger; kill -CONT " << transport_->pid_of(decided.culprit)
         << " continues it)";
  } else if (const auto silence = transport_->describe_silence(decided.culprit); !silence.empty()) {
    text << ", which " << silence << "; it may be stopped, its host lost, or the wire cut";
  } else {
    text << "; a late rank may be stopped, slower than the timeout allows, or in another part of the program";
  }
  if (cause_is_late && late.size() > 1) text << "; late were " << describe(late);
  return text.str();
}

ChannelError GroupMembers::describe_failure(const std::vector<int>& late, std::chrono::nanoseconds timeout,
                                            bool to_others) const {
  const Decision decided = cause();
  const auto kind = static_cast<FailureKind>(decided.kind);
  const int culprit = decided.culprit;
  const bool left_behind = kind == FailureKind::kPeerLeft && MembershipAgreement(*this).left_behind();
  const bool has_culprit = kind == FailureKind::kPeerEnded || kind == FailureKind::kPeerLeft ||
                           kind == FailureKind::kTimeout || kind == FailureKind::kAborted;
  if (has_culprit && !left_behind) transport_->note_culprit(culprit);
  // What another host takes for an end may be a lost connection, of a rank that lives here: that is not told on.
  if (const char* told = outside_text()) return {kind, told};
  std::ostringstream text;
  switch (kind) {
    case FailureKind::kPeerEnded:
      transport_->tell_end_of(culprit);
      text << transport_->describe_end(culprit);
      break;
    case FailureKind::kPeerLeft:
      if (left_behind) {
        text << transport_->describe(culprit)
             << " has gone on in a smaller group (shrink_group), which this rank is not in";
      } else {
        text << transport_->describe(culprit)
             << " has left the group (destroyed it or ended) without this operation; it may have met an "
                "error, or have run out of data first ("
             << kUnequalBatches << ")";
      }
      break;
    case FailureKind::kTimeout:
      text << describe_timeout(decided, late, timeout, to_others);
      break;
    case FailureKind::kMismatch:
      text << kDifferentOperations;
      break;
    case FailureKind::kAborted:
      text << "aborted by " << transport_->describe(culprit);
      if (culprit != transport_->rank() || to_others)
        text << ", by a call of abort() or by an exception there";
      break;
    case FailureKind::kLeftBehind:
    case FailureKind::kNone:
      text << "failed";
      break;
  }
  return {kind, text.str()};
}

}  // namespace lockstep::transport
