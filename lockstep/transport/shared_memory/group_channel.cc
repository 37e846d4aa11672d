#include <algorithm>
#include <cstring>
#include <sstream>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/base/cpu.h>
#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/ranks.h>
#include <lockstep/rendezvous/roll_call.h>
#include <lockstep/transport/shared_memory/group_channel.h>

namespace lockstep::transport {
namespace {

using layout::ControlBlock;
using layout::kPartialBytes;
using layout::kPayloadBytes;

constexpr size_t round_up_to_line(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

/// The group's verdict on one operation, in one word so that one compare-and-swap decides for all.
struct Decision {
  static constexpr uint64_t kSuccess = 15;
  uint64_t sequence;  // 40 bits
  uint64_t kind;      // FailureKind or kSuccess
  int culprit;        // the rank that failed
  int by;             // the rank that gave up

  static Decision unpack(uint64_t word) {
    return {word >> 24, word >> 20 & 0xf, static_cast<int>(word >> 10 & 0x3ff),
            static_cast<int>(word & 0x3ff)};
  }
  uint64_t pack() const {
    return sequence << 24 | kind << 20 | static_cast<uint64_t>(culprit) << 10 | static_cast<uint64_t>(by);
  }
  bool is_failure() const { return kind != 0 && kind != kSuccess; }
};
constexpr int kMaxRanks = 1 << 10;

uint64_t pack_reference(const MemoryReference& reference) {
  // Offsets are multiples of a cache line; 0 means none.
  return (uint64_t{reference.segment} << 44 | reference.offset >> 6) + 1;
}
MemoryReference unpack_reference(uint64_t word) {
  --word;
  return {static_cast<uint32_t>(word >> 44), (word & ((uint64_t{1} << 44) - 1)) << 6};
}

}  // namespace

// ---- joining and leaving

size_t GroupChannel::block_bytes(int size) {
  size_t bytes = sizeof(ControlBlock) + 2 * kPayloadBytes + round_up_to_line(size);
  if (size > kFlatRanks) bytes += 2 * kPartialBytes + 2 * kPayloadBytes;
  return bytes;
}

GroupChannel::Member GroupChannel::member_at(std::byte* block) const {
  Member member;
  member.block = reinterpret_cast<ControlBlock*>(block);
  member.closed = reinterpret_cast<std::atomic<uint8_t>*>(block + sizeof(ControlBlock));
  member.payloads = block + sizeof(ControlBlock) + round_up_to_line(members_.size());
  return member;
}

GroupChannel::GroupChannel(std::shared_ptr<HostTransport> transport, std::vector<int> members)
    : transport_(std::move(transport)), members_(std::move(members)) {
  TORCH_CHECK_VALUE(members_.size() < kMaxRanks, "a group on one host has fewer than ", kMaxRanks,
                    " ranks, not ", members_.size());
  auto own = std::find(members_.begin(), members_.end(), transport_->rank());
  TORCH_INTERNAL_ASSERT(own != members_.end());
  rank_ = static_cast<int>(own - members_.begin());
  const int cores = usable_cores();
  foreground_policy_ = choose_wait_policy(transport_->world_size(), cores, false);
  background_policy_ = choose_wait_policy(transport_->world_size(), cores, true);
}

std::shared_ptr<GroupChannel> GroupChannel::open(std::shared_ptr<HostTransport> transport, c10d::Store& store,
                                                 const std::string& name, std::vector<int> members,
                                                 const Deadline& deadline) {
  std::shared_ptr<GroupChannel> channel(new GroupChannel(std::move(transport), std::move(members)));
  Arena& arena = channel->transport_->arena();
  const int size = channel->size();
  std::byte* own = arena.allocate(block_bytes(size));
  // Flags must be zero before a peer learns the address; payloads need not be, and their pages stay
  // untouched.
  std::memset(own, 0, sizeof(ControlBlock) + round_up_to_line(size));
  channel->own_block_ = own;
  const auto reference = arena.find(own, block_bytes(size));
  std::vector<std::string> references;
  if (size == 1) {
    references.push_back(std::to_string(pack_reference(*reference)));
  } else {
    references = exchange(store, "lockstep/channel/" + name, channel->rank_, size,
                          std::to_string(pack_reference(*reference)), deadline);
  }
  for (int rank = 0; rank < size; ++rank) {
    std::byte* block =
        rank == channel->rank_
            ? own
            : channel->transport_->address(channel->members_[rank],
                                           unpack_reference(std::stoull(references[rank])), deadline);
    channel->blocks_.push_back(channel->member_at(block));
  }
  channel->transport_->add_channel(channel.get());
  channel->join(name, deadline);
  return channel;
}

// The first wait of the group: nobody goes on before all have read the others' addresses from the store,
// which may end with rank 0's process.
void GroupChannel::join(const std::string& name, const Deadline& deadline) {
  joining_ = true;
  deadline_ = deadline;
  timeout_ = deadline.remaining();
  policy_ = foreground_policy_;
  sequence_.store(1, std::memory_order_relaxed);  // a failure here is one of the first operation
  // Release: pairs with the load below.
  blocks_[rank_].block->joined.value.store(1, std::memory_order_release);
  publish_fence();
  ring(0, size());
  try {
    await_ranks(0, size(), 1, [&](int rank) {
      return blocks_[rank].block->joined.value.load(std::memory_order_acquire) != 0;
    });
  } catch (const ChannelError& error) {
    const std::string text = "making group '" + name + "' failed on rank " +
                             std::to_string(transport_->rank()) + ": " + error.what();
    if (error.kind() == FailureKind::kTimeout) LOCKSTEP_THROW_TIMEOUT(text);
    C10_THROW_ERROR(DistBackendError, text);
  }
  sequence_.store(0, std::memory_order_relaxed);
  joining_ = false;
}

GroupChannel::~GroupChannel() {
  if (transport_->in_forked_child()) return;
  transport_->remove_channel(this);
  if (blocks_.size() != members_.size()) {
    // open() did not get through: nobody else knows, or will use, this block's address … but they may learn
    // it yet.
    return;
  }
  leave();
  for (auto& member : blocks_) member.closed[rank_].store(1, std::memory_order_release);
  // A member's memory may be used again once nobody can read or write it any more: all have closed, or ended.
  auto unused = [transport = transport_.get(), own = blocks_[rank_], members = members_] {
    for (size_t rank = 0; rank < members.size(); ++rank) {
      if (own.closed[rank].load(std::memory_order_acquire) == 0 && !transport->has_ended(members[rank]))
        return false;
    }
    return true;
  };
  auto release = [arena = transport_->shared_arena(), block = own_block_, scratch = scratch_,
                  releases = std::move(releases_)] {
    for (const auto& also : releases) also();
    if (scratch != nullptr) arena->deallocate(scratch);
    arena->deallocate(block);
  };
  transport_->retire(std::move(unused), std::move(release));
}

void GroupChannel::leave() {
  // Release: whoever sees it also sees that the last operation's flags are set.
  blocks_[rank_].block->left.value.store(1, std::memory_order_release);
  publish_fence();
  ring(0, size());
}

void GroupChannel::release_after_close(std::function<void()> release) {
  releases_.push_back(std::move(release));
}

// ---- one operation

void GroupChannel::begin(const Deadline& deadline, bool background) {
  TORCH_CHECK_WITH(
      DistBackendError, !transport_->in_forked_child(),
      "a process group of the parent can't be used in a forked child; start the child's own group, or "
      "start processes by lockstep::spawn instead of fork()");
  if (failure_) throw *failure_;
  if (failed()) fail_as_decided({});
  deadline_ = deadline;
  timeout_ = deadline.remaining();
  policy_ = background ? background_policy_ : foreground_policy_;
  sequence_.store(sequence() + 1, std::memory_order_relaxed);
}

void GroupChannel::announce(const Announcement& announcement) {
  failpoint::here("announce");
  layout::Slot& own = slot(rank_);
  own.digest = announcement.digest;
  own.details = announcement.details;
  own.has_memory = announcement.memory.has_value();
  if (announcement.memory) {
    own.memory_segment = announcement.memory->segment;
    own.memory_offset = announcement.memory->offset;
  }
  if (announcement.payload_bytes > 0) {
    std::memcpy(const_cast<void*>(payload(rank_)), announcement.payload, announcement.payload_bytes);
  }
  // Release: whoever sees the sequence sees the announcement, and all that this rank wrote before.
  own.sequence.store(sequence(), std::memory_order_release);
  publish_fence();
  if (size() <= kFlatRanks) {
    ring(0, size());
  } else {
    const int leader = rank_ - rank_ % kFlatRanks;
    if (leader != rank_) ring(leader, leader + 1);
  }
}

void GroupChannel::await_announcements(const PayloadCombiner* combiner) {
  if (size() <= kFlatRanks) {
    await_flat();
  } else {
    await_tree(combiner);
  }
}

void GroupChannel::await_flat() {
  const uint64_t sequence = this->sequence();
  await_ranks(0, size(), 1,
              [&](int rank) { return slot(rank).sequence.load(std::memory_order_acquire) >= sequence; });
  all_have_memory_ = true;
  bool mismatch = false;
  for (int rank = 0; rank < size(); ++rank) {
    mismatch |= slot(rank).digest != slot(rank_).digest;
    all_have_memory_ &= slot(rank).has_memory != 0;
  }
  if (mismatch) {
    decide(FailureKind::kMismatch, rank_, sequence);
    fail_as_decided({});
  }
}

// Two levels of radix 8: a leader (every eighth rank) combines its eight, rank 0 combines the leaders,
// everybody reads rank 0's result. Beyond 64 ranks rank 0 has more than eight leaders, which costs time but
// nothing else.
void GroupChannel::await_tree(const PayloadCombiner* combiner) {
  const uint64_t sequence = this->sequence();
  const size_t parity = sequence & 1;
  auto announced = [&](int rank) { return slot(rank).sequence.load(std::memory_order_acquire) >= sequence; };

  if (rank_ % kFlatRanks == 0) {
    const int last = std::min(rank_ + kFlatRanks, size());
    await_ranks(rank_, last, 1, announced);
    layout::Summary& combined = blocks_[rank_].block->combined[parity];
    combined.mismatch = 0;
    combined.all_have_memory = 1;
    std::vector<const void*> inputs;
    for (int rank = rank_; rank < last; ++rank) {
      combined.mismatch |= slot(rank).digest != slot(rank_).digest;
      combined.all_have_memory &= slot(rank).has_memory;
      inputs.push_back(payload(rank));
    }
    if (combiner != nullptr && combined.mismatch == 0) combiner->combine(partial_payload(rank_), inputs);
    combined.sequence.store(sequence, std::memory_order_release);
    publish_fence();
    ring(0, 1);
  }
  if (rank_ == 0) {
    await_ranks(0, size(), kFlatRanks, [&](int leader) {
      return blocks_[leader].block->combined[parity].sequence.load(std::memory_order_acquire) >= sequence;
    });
    layout::Summary& result = blocks_[0].block->result[parity];
    result.mismatch = 0;
    result.all_have_memory = 1;
    std::vector<const void*> partials;
    for (int leader = 0; leader < size(); leader += kFlatRanks) {
      const layout::Summary& combined = blocks_[leader].block->combined[parity];
      result.mismatch |= combined.mismatch | static_cast<uint32_t>(slot(leader).digest != slot(0).digest);
      result.all_have_memory &= combined.all_have_memory;
      partials.push_back(partial_payload(leader));
    }
    if (combiner != nullptr && result.mismatch == 0) combiner->finish(result_payload(), partials);
    result.sequence.store(sequence, std::memory_order_release);
    publish_fence();
    ring(0, size());
  }
  await_ranks(0, 1, 1, [&](int) {
    return blocks_[0].block->result[parity].sequence.load(std::memory_order_acquire) >= sequence;
  });
  const layout::Summary& result = blocks_[0].block->result[parity];
  all_have_memory_ = result.all_have_memory != 0;
  if (result.mismatch != 0) {
    decide(FailureKind::kMismatch, rank_, sequence);
    fail_as_decided({});
  }
}

const void* GroupChannel::payload(int rank) const {
  return blocks_[rank].payloads + (sequence() & 1) * kPayloadBytes;
}
std::byte* GroupChannel::partial_payload(int rank) const {
  return blocks_[rank].payloads + 2 * kPayloadBytes + (sequence() & 1) * kPartialBytes;
}
std::byte* GroupChannel::result_payload() const {
  return blocks_[0].payloads + 2 * kPayloadBytes + 2 * kPartialBytes + (sequence() & 1) * kPayloadBytes;
}
const void* GroupChannel::combined_payload() const {
  return result_payload();
}

std::byte* GroupChannel::memory(int rank) {
  const layout::Slot& announced = slot(rank);
  return transport_->address(members_[rank], {announced.memory_segment, announced.memory_offset}, deadline_);
}

const std::array<std::byte, layout::kDetailBytes>& GroupChannel::details(int rank) const {
  return slot(rank).details;
}

layout::Flag& GroupChannel::flag_of(Flag flag, int rank) const {
  ControlBlock& block = *blocks_[rank].block;
  switch (flag) {
    case Flag::kStaged:
      return block.staged;
    case Flag::kReduced:
      return block.reduced;
    case Flag::kDone:
      break;
  }
  return block.done;
}

void GroupChannel::publish(Flag flag, uint64_t value) {
  // Release: pairs with the acquire load in await_all and await_rank.
  flag_of(flag, rank_).value.store(value, std::memory_order_release);
  publish_fence();
  ring(0, size());
}

void GroupChannel::await_all(Flag flag, uint64_t value) {
  await_ranks(0, size(), 1,
              [&](int rank) { return flag_of(flag, rank).value.load(std::memory_order_acquire) >= value; });
}

void GroupChannel::await_rank(Flag flag, int rank, uint64_t value) {
  await_ranks(rank, rank + 1, 1,
              [&](int peer) { return flag_of(flag, peer).value.load(std::memory_order_acquire) >= value; });
}

std::byte* GroupChannel::scratch(size_t bytes) {
  if (scratch_bytes_ < bytes) {
    Arena& arena = transport_->arena();
    // Between operations nobody reads the old scratch: every earlier operation was committed.
    if (scratch_ != nullptr) arena.deallocate(scratch_);
    scratch_ = nullptr;
    scratch_ = arena.allocate(bytes);
    scratch_bytes_ = bytes;
    // Release; readers load it behind an await of a flag that this rank publishes later.
    blocks_[rank_].block->scratch.value.store(pack_reference(*arena.find(scratch_, bytes)),
                                              std::memory_order_release);
  }
  return scratch_;
}

std::byte* GroupChannel::scratch_of(int rank) {
  const uint64_t word = blocks_[rank].block->scratch.value.load(std::memory_order_acquire);
  TORCH_INTERNAL_ASSERT(word != 0, "rank ", rank, " has no scratch");
  return transport_->address(members_[rank], unpack_reference(word), deadline_);
}

// ---- waiting and failure

void GroupChannel::ring(int first, int last) {
  for (int rank = first; rank < last; ++rank) blocks_[rank].block->doorbell.ring();
}

void GroupChannel::wake_waiter() {
  blocks_[rank_].block->doorbell.ring_now();
}

bool GroupChannel::failed() const {
  return Decision::unpack(verdict().decision.load(std::memory_order_acquire)).is_failure();
}

bool GroupChannel::is_gone(int rank) const {
  return blocks_[rank].block->left.value.load(std::memory_order_acquire) != 0 ||
         transport_->has_ended(members_[rank]);
}

template <class Arrived>
void GroupChannel::await_ranks(int first, int last, int step, Arrived&& arrived) {
  int next = first;
  auto complete = [&] {
    while (next < last && arrived(next)) next += step;
    return next >= last;
  };
  Doorbell& bell = blocks_[rank_].block->doorbell;
  while (!complete()) {
    const uint32_t endings = transport_->endings();
    for (int rank = next; rank < last; rank += step) {
      // First look whether it is gone, then whether it arrived before it went.
      if (!is_gone(rank) || arrived(rank)) continue;
      const bool ended = transport_->has_ended(members_[rank]);
      if (give_up(ended ? FailureKind::kPeerEnded : FailureKind::kPeerLeft, rank, complete)) return;
    }
    const bool woken = wait_until(bell, policy_, deadline_, [&] {
      return complete() || failed() || transport_->endings() != endings ||
             blocks_[next].block->left.value.load(std::memory_order_relaxed) != 0;
    });
    if (complete()) return;
    if (failed()) {
      auto late = not_announced();
      fail_as_decided(late);
    }
    if (!woken && give_up(FailureKind::kTimeout, next, complete)) return;
  }
}

// All or none. An operation has succeeded when all members' flags of its last wait are set. Whoever wants to
// give up before that first says so (proposal), then looks at the flags again: if they are set after all, it
// goes on. Whoever sees all flags looks whether anybody proposes to give up; only then both sides meet at the
// compare-and-swap, and the first one decides. The fences make sure that not both can miss the other: either
// the one sees the proposal, or the other sees all flags.
template <class Complete>
bool GroupChannel::give_up(FailureKind kind, int culprit, Complete&& complete) {
  const uint64_t sequence = this->sequence();
  propose_to_give_up(sequence);
  publish_fence();
  if (complete()) return true;
  failpoint::here("give_up");
  auto late = not_announced();
  if (!decide(kind, culprit, sequence) && !failed()) {
    // Somebody saw all flags between our look and our decision, and was first: the operation has succeeded.
    TORCH_INTERNAL_ASSERT(complete());
    return true;
  }
  if (late.empty()) late.push_back(culprit);
  fail_as_decided(late);
}

void GroupChannel::propose_to_give_up(uint64_t sequence) {
  auto& proposal = verdict().proposal;
  uint64_t proposed = proposal.load(std::memory_order_relaxed);
  while (proposed < sequence &&
         !proposal.compare_exchange_weak(proposed, sequence, std::memory_order_seq_cst)) {
  }
}

/// Whether this call's failure (kNone: success) became the group's decision on the operation.
bool GroupChannel::decide(FailureKind kind, int culprit, uint64_t sequence) {
  Decision wanted{sequence, kind == FailureKind::kNone ? Decision::kSuccess : static_cast<uint64_t>(kind),
                  culprit, rank_};
  auto& decision = verdict().decision;
  uint64_t current = decision.load(std::memory_order_acquire);
  do {
    const Decision decided = Decision::unpack(current);
    if (decided.is_failure() || decided.sequence >= sequence) return false;
  } while (!decision.compare_exchange_weak(current, wanted.pack(), std::memory_order_acq_rel));
  publish_fence();
  for (auto& member : blocks_) member.block->doorbell.ring();
  return true;
}

void GroupChannel::commit() {
  const uint64_t sequence = this->sequence();
  publish_fence();
  if (verdict().proposal.load(std::memory_order_acquire) >= sequence) {
    decide(FailureKind::kNone, rank_, sequence);
    // A decision on a later operation means that somebody went on from this one: it had succeeded.
    const Decision decided = Decision::unpack(verdict().decision.load(std::memory_order_acquire));
    if (decided.is_failure() && decided.sequence <= sequence) fail_as_decided({});
  }
  committed_.store(sequence, std::memory_order_relaxed);
}

void GroupChannel::abort() {
  const uint64_t sequence = committed_.load(std::memory_order_relaxed) + 1;
  propose_to_give_up(sequence);
  decide(FailureKind::kAborted, rank_, sequence);
}

std::vector<int> GroupChannel::not_announced() const {
  std::vector<int> late;
  for (int rank = 0; rank < size(); ++rank) {
    const bool arrived = joining_ ? blocks_[rank].block->joined.value.load(std::memory_order_acquire) != 0
                                  : slot(rank).sequence.load(std::memory_order_acquire) >= sequence();
    if (!arrived) late.push_back(rank);
  }
  return late;
}

std::string GroupChannel::describe(const std::vector<int>& ranks) const {
  std::vector<int> global;
  std::ostringstream pids;
  for (int rank : ranks) {
    global.push_back(members_[rank]);
    if (ranks.size() <= 4) pids << (pids.tellp() > 0 ? ", " : " (pid ") << transport_->pid_of(members_[rank]);
  }
  std::ostringstream text;
  text << name_ranks(global) << pids.str();
  if (pids.tellp() > 0) text << ')';
  return text.str();
}

void GroupChannel::fail_as_decided(const std::vector<int>& late) {
  const Decision decided = Decision::unpack(verdict().decision.load(std::memory_order_acquire));
  const auto kind = static_cast<FailureKind>(decided.kind);
  const bool by_me = decided.by == rank_;
  std::ostringstream text;
  switch (kind) {
    case FailureKind::kPeerEnded:
      text << transport_->describe_end(members_[decided.culprit]);
      break;
    case FailureKind::kPeerLeft:
      text << describe({decided.culprit})
           << " has left the group (destroyed it or ended) without this operation";
      break;
    case FailureKind::kTimeout:
      if (by_me) {
        text << "timed out after " << to_seconds(timeout_) << " s waiting for "
             << describe(late.empty() ? std::vector<int>{decided.culprit} : late);
      } else {
        text << describe({decided.by}) << " timed out";
        if (!late.empty()) text << " waiting for " << describe(late);
      }
      text << "; the late ones may be stopped, slower than the timeout, or in another part of the program";
      break;
    case FailureKind::kMismatch:
      text << "the ranks called different operations";
      break;
    case FailureKind::kAborted:
      text << "aborted by " << describe({decided.by});
      break;
    case FailureKind::kNone:
      text << "failed";
      break;
  }
  if (!failure_) failure_.emplace(kind, text.str());
  throw *failure_;
}

}  // namespace lockstep::transport
