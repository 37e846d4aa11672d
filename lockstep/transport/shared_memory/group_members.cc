#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/format_duration.h>
#include <lockstep/base/ranks.h>
#include <lockstep/transport/shared_memory/group_members.h>
#include <lockstep/transport/shared_memory/recovery_board.h>

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

uint64_t pack_decision(const Decision& decision) {
  return decision.sequence << 24 | decision.kind << 20 | static_cast<uint64_t>(decision.culprit) << 10 |
         static_cast<uint64_t>(decision.by);
}
Decision unpack_decision(uint64_t word) {
  return {word >> 24, word >> 20 & 0xf, static_cast<int>(word >> 10 & 0x3ff), static_cast<int>(word & 0x3ff)};
}

uint64_t pack_reference(const MemoryReference& reference) {
  // Offsets are multiples of a cache line.
  return (uint64_t{reference.segment} << 44 | reference.offset >> 6) + 1;
}
MemoryReference unpack_reference(uint64_t word) {
  --word;
  return {static_cast<uint32_t>(word >> 44), (word & ((uint64_t{1} << 44) - 1)) << 6};
}

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
  group->map_blocks(group->size() == 1 ? std::vector<uint64_t>{own.word()} : exchange(own.word()), deadline);
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
  // A member's memory may be used again once nobody can read or write it any more: all have closed, or ended.
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
  // Release: whoever sees it also sees that the last operation's flags are set.
  block(rank_).left.value.store(1, std::memory_order_release);
  publish_fence();
  ring(0, size());
  for (int rank = 0; rank < size(); ++rank) {
    block(rank).messages.notify();
    block(rank).recovery.doorbell.ring();
  }
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

// ---- the verdict

Decision GroupMembers::decision() const {
  return unpack_decision(block(0).verdict.decision.load(std::memory_order_acquire));
}

void GroupMembers::propose_to_give_up(uint64_t sequence) {
  auto& proposal = block(0).verdict.proposal;
  uint64_t proposed = proposal.load(std::memory_order_relaxed);
  while (proposed < sequence &&
         !proposal.compare_exchange_weak(proposed, sequence, std::memory_order_seq_cst)) {
  }
}

bool GroupMembers::is_proposed(uint64_t sequence) const {
  return block(0).verdict.proposal.load(std::memory_order_acquire) >= sequence;
}

bool GroupMembers::decide(FailureKind kind, int culprit, uint64_t sequence) {
  const Decision wanted{sequence,
                        kind == FailureKind::kNone ? Decision::kSuccess : static_cast<uint64_t>(kind),
                        culprit, rank_};
  auto& word = block(0).verdict.decision;
  uint64_t current = word.load(std::memory_order_acquire);
  do {
    const Decision decided = unpack_decision(current);
    if (decided.is_failure() || decided.sequence >= sequence) return false;
  } while (!word.compare_exchange_weak(current, pack_decision(wanted), std::memory_order_acq_rel));
  publish_fence();
  ring(0, size());
  if (wanted.is_failure()) {
    for (int rank = 0; rank < size(); ++rank) block(rank).messages.notify();
  }
  return true;
}

std::string GroupMembers::describe(const std::vector<int>& ranks) const {
  std::vector<int> global;
  std::ostringstream pids;
  for (int rank : ranks) {
    global.push_back(job_rank(rank));
    if (ranks.size() <= 4) pids << (pids.tellp() > 0 ? ", " : " (pid ") << transport_->pid_of(members_[rank]);
  }
  std::ostringstream text;
  text << name_ranks(global) << transport_->of_the_job() << pids.str();
  if (pids.tellp() > 0) text << ')';
  return text.str();
}

ChannelError GroupMembers::describe_failure(const std::vector<int>& late,
                                            std::chrono::nanoseconds timeout) const {
  const Decision decided = decision();
  const auto kind = static_cast<FailureKind>(decided.kind);
  std::ostringstream text;
  switch (kind) {
    case FailureKind::kPeerEnded:
      text << describe_end(decided.culprit);
      break;
    case FailureKind::kPeerLeft:
      if (RecoveryBoard(*this).left_behind()) {
        text << describe({decided.culprit})
             << " has gone on in a smaller group (shrink_group), which this rank is not in";
      } else {
        text << describe({decided.culprit})
             << " has left the group (destroyed it or ended) without this operation";
      }
      break;
    case FailureKind::kTimeout:
      if (decided.by == rank_) {
        text << "timed out after " << format_duration(timeout) << " waiting for "
             << describe(late.empty() ? std::vector<int>{decided.culprit} : late);
      } else {
        text << describe({decided.by}) << " timed out";
        if (!late.empty()) text << " waiting for " << describe(late);
      }
      text << "; the late ones may be stopped, slower than the timeout allows, or in another part of the "
              "program";
      break;
    case FailureKind::kMismatch:
      text << "the ranks called different operations";
      break;
    case FailureKind::kAborted:
      text << "aborted by " << describe({decided.by});
      break;
    case FailureKind::kLeftBehind:
    case FailureKind::kNone:
      text << "failed";
      break;
  }
  return {kind, text.str()};
}

}  // namespace lockstep::transport
