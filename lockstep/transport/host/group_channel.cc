#include <algorithm>
#include <cstring>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/cpu.h>
#include <lockstep/transport/host/group_channel.h>

namespace lockstep::transport {

using layout::kPartialBytes;
using layout::kPayloadBytes;

constexpr const char* kDifferentOperations = "the ranks called different operations";

// ---- joining and leaving

GroupChannel::GroupChannel(std::shared_ptr<GroupMembers> members)
    : members_(std::move(members)), rank_(members_->rank()), messages_(members_) {
  const int ranks = members_->transport().living_count();
  const int cores = usable_cores();
  foreground_policy_ = choose_wait_policy(ranks, cores, false);
  background_policy_ = choose_wait_policy(ranks, cores, true);
  spin_apart_ = ranks <= cores && ranks > 1;
}

std::shared_ptr<GroupChannel> GroupChannel::open(std::shared_ptr<HostTransport> transport,
                                                 std::vector<int> members, const AddressExchange& exchange,
                                                 const Deadline& deadline) {
  auto group = GroupMembers::open(std::move(transport), std::move(members), exchange, deadline);
  const int rank = group->job_rank(group->rank());
  try {
    return open(std::move(group), deadline);
  } catch (const ChannelError& error) {
    const std::string text =
        "making the process group failed on rank " + std::to_string(rank) + ": " + error.what();
    if (error.kind() == FailureKind::kTimeout) LOCKSTEP_THROW_TIMEOUT(text);
    C10_THROW_ERROR(DistBackendError, text);
  }
}

std::shared_ptr<GroupChannel> GroupChannel::open(std::shared_ptr<GroupMembers> members,
                                                 const Deadline& deadline) {
  auto channel = open_beside(std::move(members));
  channel->join(deadline);
  return channel;
}

std::shared_ptr<GroupChannel> GroupChannel::open_beside(std::shared_ptr<GroupMembers> members) {
  return std::shared_ptr<GroupChannel>(new GroupChannel(std::move(members)));
}

// The first wait of the group: no rank goes on before all have the others' addresses, for `exchange` may end
// with rank 0's process.
void GroupChannel::join(const Deadline& deadline) {
  joining_ = true;
  deadline_ = deadline;
  timeout_ = deadline.remaining();
  policy_ = foreground_policy_;
  sequence_.store(1, std::memory_order_relaxed);  // a failure here is one of the first operation
  // Release: pairs with the load below.
  block(rank_).joined.value.store(1, std::memory_order_release);
  publish_fence();
  members_->ring(0, size());
  await_ranks(0, size(), 1, 1, [&](int rank) { return &block(rank).joined.value; });
  sequence_.store(0, std::memory_order_relaxed);
  joining_ = false;
}

GroupChannel::~GroupChannel() {
  if (scratch_ == nullptr) return;
  members_->release_after_close(
      [arena = transport().shared_arena(), scratch = scratch_] { arena->deallocate(scratch); });
}

// ---- one operation

void GroupChannel::begin(const Deadline& deadline, bool background) {
  TORCH_CHECK_WITH(
      DistBackendError, !transport().in_forked_child(),
      "a process group of the parent can't be used in a forked child; start the child's own group, or "
      "start processes by lockstep::spawn instead of fork()");
  if (failure_) throw *failure_;
  if (failed()) {
    // An abort decides nothing by itself. This rank has not announced the operation, so that no rank can have
    // succeeded in it; but a failure there would hide whether the one before has failed, if that is open.
    if (const int aborter = members_->aborted_by(); aborter >= 0 && concluded_) {
      members_->fail(FailureKind::kAborted, members_->transport_rank(aborter), sequence() + 1);
    }
    fail_as_decided({});
  }
  deadline_ = deadline;
  timeout_ = deadline.remaining();
  policy_ = background ? background_policy_ : foreground_policy_;
  sequence_.store(sequence() + 1, std::memory_order_relaxed);
  concluded_ = false;
}

std::byte* GroupChannel::own_payload() {
  return members_->payloads(rank_) + (sequence() & 1) * kPayloadBytes;
}

void GroupChannel::announce(const Announcement& announcement) {
  failpoint::here("announce");
  layout::Slot& own = slot(rank_);
  own.digest = announcement.digest;
  own.details = announcement.details;
  own.has_memory = announcement.memory.has_value();
  own.cpu.store(static_cast<uint16_t>(current_cpu()), std::memory_order_relaxed);
  if (announcement.memory) {
    own.memory_segment = announcement.memory->segment;
    own.memory_offset = announcement.memory->offset;
  }
  if (announcement.payload_bytes > 0) {
    std::memcpy(own_payload(), announcement.payload, announcement.payload_bytes);
  }
  // Release: a rank that sees the sequence sees the announcement, and all that this rank wrote before.
  own.sequence.store(sequence(), std::memory_order_release);
  publish_fence();
  if (size() <= kFlatRanks) {
    members_->ring(0, size());
  } else {
    const int leader = rank_ - rank_ % kFlatRanks;
    if (leader != rank_) members_->ring(leader, leader + 1);
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
  await_ranks(0, size(), 1, sequence(), [&](int rank) { return &slot(rank).sequence; });
  all_have_memory_ = true;
  bool mismatch = false;
  for (int rank = 0; rank < size(); ++rank) {
    mismatch |= slot(rank).digest != slot(rank_).digest;
    all_have_memory_ &= slot(rank).has_memory != 0;
  }
  if (mismatch) refuse(kDifferentOperations);
}

// Two levels of radix 8: a leader (every eighth rank) combines its eight, rank 0 combines the leaders,
// all ranks read rank 0's result. Beyond 64 ranks rank 0 has more than eight leaders, which costs time but
// nothing else.
void GroupChannel::await_tree(const PayloadCombiner* combiner) {
  const uint64_t sequence = this->sequence();
  const size_t parity = sequence & 1;
  if (rank_ % kFlatRanks == 0) {
    const int last = std::min(rank_ + kFlatRanks, size());
    await_ranks(rank_, last, 1, sequence, [&](int rank) { return &slot(rank).sequence; });
    layout::Summary& combined = block(rank_).combined[parity];
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
    members_->ring(0, 1);
  }
  if (rank_ == 0) {
    await_ranks(0, size(), kFlatRanks, sequence,
                [&](int leader) { return &block(leader).combined[parity].sequence; });
    layout::Summary& result = block(0).result[parity];
    result.mismatch = 0;
    result.all_have_memory = 1;
    std::vector<const void*> partials;
    for (int leader = 0; leader < size(); leader += kFlatRanks) {
      const layout::Summary& combined = block(leader).combined[parity];
      result.mismatch |= combined.mismatch | static_cast<uint32_t>(slot(leader).digest != slot(0).digest);
      result.all_have_memory &= combined.all_have_memory;
      partials.push_back(partial_payload(leader));
    }
    if (combiner != nullptr && result.mismatch == 0) combiner->finish(result_payload(), partials);
    result.sequence.store(sequence, std::memory_order_release);
    publish_fence();
    members_->ring(0, size());
  }
  await_ranks(0, 1, 1, sequence, [&](int) { return &block(0).result[parity].sequence; });
  const layout::Summary& result = block(0).result[parity];
  all_have_memory_ = result.all_have_memory != 0;
  if (result.mismatch != 0) refuse(kDifferentOperations);
}

const void* GroupChannel::payload(int rank) const {
  return members_->payloads(rank) + (sequence() & 1) * kPayloadBytes;
}
std::byte* GroupChannel::partial_payload(int rank) const {
  return members_->payloads(rank) + 2 * kPayloadBytes + (sequence() & 1) * kPartialBytes;
}
std::byte* GroupChannel::result_payload() const {
  return members_->payloads(0) + 2 * kPayloadBytes + 2 * kPartialBytes + (sequence() & 1) * kPayloadBytes;
}
const void* GroupChannel::combined_payload() const {
  return result_payload();
}

std::byte* GroupChannel::memory(int rank) {
  const layout::Slot& announced = slot(rank);
  return memory(rank, {announced.memory_segment, announced.memory_offset});
}
std::byte* GroupChannel::memory(int rank, const MemoryReference& reference) {
  return transport().address(members_->transport_rank(rank), reference, deadline_);
}

void GroupChannel::refuse(const std::string& text) {
  members_->fail(FailureKind::kMismatch, members_->transport_rank(rank_), sequence());
  if (!failure_) failure_.emplace(FailureKind::kMismatch, text);
  throw *failure_;
}

const std::array<std::byte, layout::kDetailBytes>& GroupChannel::details(int rank) const {
  return slot(rank).details;
}

layout::Flag& GroupChannel::flag_of(Flag flag, int rank) const {
  layout::ControlBlock& block = this->block(rank);
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
  members_->ring(0, size());
}

void GroupChannel::await_all(Flag flag, uint64_t value) {
  await_ranks(0, size(), 1, value, [&](int rank) { return &flag_of(flag, rank).value; });
}

void GroupChannel::await_rank(Flag flag, int rank, uint64_t value) {
  await_ranks(rank, rank + 1, 1, value, [&](int peer) { return &flag_of(flag, peer).value; });
}

std::byte* GroupChannel::scratch(size_t bytes) {
  if (scratch_bytes_ < bytes) {
    Arena& arena = transport().arena();
    // Between operations no rank reads the old scratch: every earlier operation was committed.
    if (scratch_ != nullptr) arena.deallocate(scratch_);
    scratch_ = nullptr;
    scratch_ = arena.allocate(bytes);
    scratch_bytes_ = bytes;
    // Release; readers load it behind an await of a flag that this rank publishes later.
    block(rank_).scratch.value.store(pack_reference(*arena.find(scratch_, bytes)), std::memory_order_release);
  }
  return scratch_;
}

std::byte* GroupChannel::scratch_of(int rank) {
  const uint64_t word = block(rank).scratch.value.load(std::memory_order_acquire);
  TORCH_INTERNAL_ASSERT(word != 0, "rank ", rank, " has no scratch");
  return transport().address(members_->transport_rank(rank), unpack_reference(word), deadline_);
}

// ---- waiting and failure

// Two ranks that spin and yield never sleep, so the kernel has no occasion to place them on two cores when
// they have come to share one; then each operation costs several switches between them, ten times its price.
WaitPolicy GroupChannel::policy_for(int rank) const {
  const bool may_spin = policy_.spins >= foreground_policy_.spins && spin_apart_;
  if (!may_spin || size() > kFlatRanks || sequence() < 2 || rank == rank_) return policy_;
  const auto& last = block(rank).slots[(sequence() - 1) & 1];
  if (last.cpu.load(std::memory_order_relaxed) != static_cast<uint16_t>(current_cpu())) return policy_;
  if (rank < rank_) move_to_another_cpu();
  return {0, policy_.yields, policy_.gives_up_yielding};
}

/// Waits until word(rank), which is in that rank's control block, is at least `value` for each of the ranks.
template <class Word>
void GroupChannel::await_ranks(int first, int last, int step, uint64_t value, Word&& word) {
  int next = first;
  // Acquire: pairs with the release store of publish(), announce() and their like.
  auto arrived = [&](int rank) { return word(rank)->load(std::memory_order_acquire) >= value; };
  auto complete = [&] {
    while (next < last && arrived(next)) next += step;
    return next >= last;
  };
  Doorbell& bell = block(rank_).doorbell;
  std::optional<RecordedWait> recorded;
  int recorded_rank = -1;
  while (!complete()) {
    const uint32_t endings = transport().endings();
    for (int rank = next; rank < last; rank += step) {
      // First look whether it is gone, then whether it arrived before it went.
      if (!members_->is_gone(rank) || arrived(rank)) continue;
      const bool ended = members_->has_ended(rank);
      if (!ended && members_->aborted_by() >= 0) continue;  // it left because of that: see below
      if (give_up(ended ? FailureKind::kPeerEnded : FailureKind::kPeerLeft, members_->transport_rank(rank),
                  complete)) {
        return;
      }
    }
    bool woken = false;
    try {
      woken = wait_until(
          bell, policy_for(next), deadline_,
          [&] {
            return complete() || failed() || transport().endings() != endings ||
                   block(next).left.value.load(std::memory_order_relaxed) != 0;
          },
          [&] {
            if (recorded_rank == next) return;
            recorded_rank = next;
            members_->record_wait(recorded, next, next, word(next), value);
          });
    } catch (...) {
      // An interruption (base/process/interrupt.h). It ends the operation for all, unless all flags are set
      // by now: then this wait is over, and the interruption reaches the caller behind the operation.
      interruption_ = std::current_exception();
      try {
        if (give_up(FailureKind::kAborted, members_->transport_rank(rank_), complete)) return;
      } catch (const ChannelError&) {
        // What has failed for the others was interrupted here.
      }
      std::rethrow_exception(take_interruption());
    }
    if (complete()) return;
    const Decision decided = members_->decision();
    if (decided.is_failure() && decided.sequence <= sequence()) fail_as_decided(not_announced());
    // A failure of a later operation was decided by a rank that had succeeded in this one.
    if (decided.is_failure() && complete()) return;
    const int aborter = members_->aborted_by();
    if (aborter >= 0 && give_up(FailureKind::kAborted, members_->transport_rank(aborter), complete)) return;
    if (!woken) {
      std::vector<int> late;
      for (int rank = next; rank < last; rank += step) {
        if (!arrived(rank)) late.push_back(members_->transport_rank(rank));
      }
      if (late.empty()) continue;  // they have come just now
      const int cause = transport().cause_of_waiting(late);
      if (give_up(FailureKind::kTimeout, cause, complete)) return;
    }
  }
}

/// True if what this rank waits for has come after all, so that it goes on.
template <class Complete>
bool GroupChannel::give_up(FailureKind kind, int culprit, Complete&& complete) {
  using Phase = OperationOutcome::Phase;
  std::vector<int> late;
  OperationOutcome outcome(members_->outcome(), rank_, sequence());
  outcome.give_up(kind, culprit);
  while (outcome.is_stepping()) {
    if (outcome.phase() == Phase::kDeciding) {
      failpoint::here("give_up");
      late = not_announced();
    }
    if (outcome.step(complete)) members_->tell_failure();
  }
  if (outcome.phase() == Phase::kFailed) fail_as_decided(late);
  TORCH_INTERNAL_ASSERT(complete());
  return true;
}

void GroupChannel::commit() {
  OperationOutcome outcome(members_->outcome(), rank_, sequence());
  outcome.see_all();
  while (outcome.is_stepping()) outcome.step([] { return true; });
  if (outcome.phase() == OperationOutcome::Phase::kFailed) fail_as_decided({});
  concluded_ = true;
}

std::vector<int> GroupChannel::not_announced() const {
  std::vector<int> late;
  for (int rank = 0; rank < size(); ++rank) {
    const bool arrived = joining_ ? block(rank).joined.value.load(std::memory_order_acquire) != 0
                                  : slot(rank).sequence.load(std::memory_order_acquire) >= sequence();
    if (!arrived) late.push_back(rank);
  }
  return late;
}

void GroupChannel::fail_as_decided(const std::vector<int>& late) {
  concluded_ = true;
  if (!failure_) failure_.emplace(members_->describe_failure(late, timeout_));
  throw *failure_;
}

}  // namespace lockstep::transport
