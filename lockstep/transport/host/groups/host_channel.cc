#include <algorithm>
#include <cstring>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/cpu.h>
#include <lockstep/transport/host/groups/host_channel.h>

namespace lockstep::transport {

using layout::kPartialBytes;
using layout::kPayloadBytes;

// ---- joining and leaving

HostChannel::HostChannel(std::shared_ptr<GroupMembers> members)
    : members_(std::move(members)), rank_(members_->rank()), messages_(members_) {
  const int ranks = members_->transport().living_count();
  const int cores = usable_cores();
  foreground_policy_ = choose_wait_policy(ranks, cores, false);
  background_policy_ = choose_wait_policy(ranks, cores, true);
  spin_apart_ = ranks <= cores && ranks > 1;
}

std::shared_ptr<HostChannel> HostChannel::open(std::shared_ptr<GroupMembers> members,
                                               const Deadline& deadline) {
  auto channel = open_beside(std::move(members));
  channel->join(deadline);
  return channel;
}

std::shared_ptr<HostChannel> HostChannel::open_beside(std::shared_ptr<GroupMembers> members) {
  return std::shared_ptr<HostChannel>(new HostChannel(std::move(members)));
}

// The first wait of the group: no rank goes on before all have the others' addresses, for `exchange` may end
// with rank 0's process.
void HostChannel::join(const Deadline& deadline) {
  enter(Phase::kJoining);
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
  enter(Phase::kConcluded);
}

HostChannel::~HostChannel() {
  if (scratch_ == nullptr) return;
  members_->release_after_close(
      [arena = transport().shared_arena(), scratch = scratch_] { arena->deallocate(scratch); });
}

// ---- one operation

void HostChannel::begin(const Deadline& deadline, bool background) {
  TORCH_CHECK_WITH(
      DistBackendError, !transport().in_forked_child(),
      "a process group of the parent can't be used in a forked child; start the child's own group, or "
      "start processes by lockstep::spawn instead of fork()");
  if (failure_) throw *failure_;
  // Over hosts: an operation that has failed elsewhere, and was told before this rank began it, fails here, too.
  if (on_failure_) transport().await_heard();
  // One that has ended may have announced the operation before: those that wait for this rank's announcement would wait on.
  // It counts, as this one is the first to fail.
  if (const auto ended = ended_member(); ended && !failed() && concluded()) {
    sequence_.store(sequence() + 1, std::memory_order_relaxed);
    members_->fail(FailureKind::kPeerEnded, *ended, sequence());
    fail_as_decided({});
  }
  if (failed()) {
    // An abort decides nothing by itself. This rank has not announced the operation, so that no rank can have
    // succeeded in it; but a failure there would hide whether the one before has failed, if that is open.
    if (const auto abort = members_->aborted(); abort && concluded()) {
      members_->fail(static_cast<FailureKind>(abort->kind), abort->culprit, sequence() + 1);
    }
    fail_as_decided({});
  }
  deadline_ = deadline;
  timeout_ = deadline.remaining();
  policy_ = background ? background_policy_ : foreground_policy_;
  outside_policy_ = policy_between_hosts(policy_);
  sequence_.store(sequence() + 1, std::memory_order_relaxed);
  enter(Phase::kUnderWay);
}

void HostChannel::expect_messages(size_t bytes) {
  constexpr size_t kLong = size_t{1} << 20;  // 0.3 ms at 25 Gbit/s
  if (bytes >= kLong) policy_ = outside_policy_ = kLongWait;
}

std::byte* HostChannel::own_payload() {
  return members_->payloads(rank_) + (sequence() & 1) * kPayloadBytes;
}

void HostChannel::announce(const Announcement& announcement) {
  failpoint::here("announce");
  layout::AnnouncementSlot& own = slot(rank_);
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

void HostChannel::await_announcements(const PayloadCombiner* combiner,
                                      const std::function<std::string()>& explain) {
  failpoint::here("announced");
  enter(Phase::kAnnouncing);
  const auto announced = c10::make_scope_exit([this] {
    if (phase() == Phase::kAnnouncing) enter(Phase::kUnderWay);  // not concluded by a failure
  });
  const bool same = size() <= kFlatRanks ? await_flat() : await_tree(combiner);
  if (!same) refuse(explain ? explain() : kDifferentOperations);
}

bool HostChannel::await_flat() {
  await_ranks(0, size(), 1, sequence(), [&](int rank) { return &slot(rank).sequence; });
  all_have_memory_ = true;
  bool mismatch = false;
  for (int rank = 0; rank < size(); ++rank) {
    mismatch |= slot(rank).digest != slot(rank_).digest;
    all_have_memory_ &= slot(rank).has_memory != 0;
  }
  return !mismatch;
}

// Two levels of radix 8: a leader (every eighth rank) combines its eight, rank 0 combines the leaders,
// all ranks read rank 0's result. Beyond 64 ranks rank 0 has more than eight leaders, which costs time but
// nothing else.
bool HostChannel::await_tree(const PayloadCombiner* combiner) {
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
  return result.mismatch == 0;
}

const void* HostChannel::payload(int rank) const {
  return members_->payloads(rank) + (sequence() & 1) * kPayloadBytes;
}
std::byte* HostChannel::partial_payload(int rank) const {
  return members_->payloads(rank) + 2 * kPayloadBytes + (sequence() & 1) * kPartialBytes;
}
std::byte* HostChannel::result_payload() const {
  return members_->payloads(0) + 2 * kPayloadBytes + 2 * kPartialBytes + (sequence() & 1) * kPayloadBytes;
}
const void* HostChannel::combined_payload() const {
  return result_payload();
}

std::byte* HostChannel::memory(int rank) {
  const layout::AnnouncementSlot& announced = slot(rank);
  return memory(rank, {announced.memory_segment, announced.memory_offset});
}
std::byte* HostChannel::memory(int rank, const MemoryReference& reference) {
  const int owner = members_->transport_rank(rank);
  try {
    return transport().address(owner, reference, deadline_);
  } catch (const c10::DistBackendError&) {
    // It ended before its memory was here: that ends the operation for all, as it ends a wait for that rank. This rank
    // has not done its part, so no rank can have succeeded.
    if (transport().has_ended(owner)) give_up(FailureKind::kPeerEnded, owner, [] { return false; });
    throw;
  }
}

const std::array<std::byte, layout::kDetailBytes>& HostChannel::details(int rank) const {
  return slot(rank).details;
}

layout::Flag& HostChannel::flag_of(Flag flag, int rank) const {
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

void HostChannel::publish(Flag flag, uint64_t value) {
  // Release: pairs with the acquire load in await_all and await_rank.
  flag_of(flag, rank_).value.store(value, std::memory_order_release);
  publish_fence();
  members_->ring(0, size());
}

void HostChannel::await_all(Flag flag, uint64_t value) {
  await_ranks(0, size(), 1, value, [&](int rank) { return &flag_of(flag, rank).value; });
}

void HostChannel::await_flag(Flag flag, int rank, uint64_t value, std::optional<WaitPolicy> policy) {
  await_ranks(
      rank, rank + 1, 1, value, [&](int peer) { return &flag_of(flag, peer).value; }, policy);
}

void HostChannel::await_rank(Flag flag, int rank, uint64_t value) {
  await_flag(flag, rank, value, std::nullopt);
}

void HostChannel::await_relay(Flag flag, int rank, uint64_t value) {
  await_flag(flag, rank, value, outside_policy_);
}

std::byte* HostChannel::scratch(size_t bytes) {
  if (scratch_bytes_ < bytes) {
    Arena& arena = transport().arena();
    // Between operations no rank reads the old scratch: every earlier operation was committed.
    if (scratch_ != nullptr) arena.deallocate(scratch_);
    scratch_ = nullptr;
    scratch_ = arena.allocate(bytes);
    scratch_bytes_ = bytes;
    // Release; readers load it after they have awaited a flag that this rank publishes later.
    block(rank_).scratch.value.store(pack_reference(*arena.find(scratch_, bytes)), std::memory_order_release);
  }
  return scratch_;
}

std::byte* HostChannel::scratch_of(int rank) {
  const uint64_t word = block(rank).scratch.value.load(std::memory_order_acquire);
  TORCH_INTERNAL_ASSERT(word != 0, "rank ", rank, " has no scratch");
  return memory(rank, unpack_reference(word));
}

// ---- waiting

// Two ranks that spin and yield never sleep, so the kernel has no occasion to place them on two cores when
// they have come to share one; then each operation costs several switches between them, ten times its price.
WaitPolicy HostChannel::policy_for(int rank) const {
  const bool may_spin = policy_.spins >= foreground_policy_.spins && spin_apart_;
  if (!may_spin || size() > kFlatRanks || sequence() < 2 || rank == rank_) return policy_;
  const auto& last = block(rank).slots[(sequence() - 1) & 1];
  if (last.cpu.load(std::memory_order_relaxed) != static_cast<uint16_t>(current_cpu())) return policy_;
  if (rank < rank_) move_to_another_cpu();
  return {0, policy_.yields, policy_.gives_up_yielding};
}

/// Until word(rank), which is in that rank's control block, is at least `value` for each of the ranks.
template <class Word>
class HostChannel::RankWait {
 public:
  RankWait(HostChannel& channel, int first, int last, int step, uint64_t value, Word& word,
           std::optional<WaitPolicy> policy)
      : channel_(channel),
        last_(last),
        step_(step),
        value_(value),
        word_(word),
        policy_(policy),
        next_(first) {}

  bool complete() {
    while (next_ < last_ && arrived(next_)) next_ += step_;
    return next_ >= last_;
  }
  std::optional<OutsideWait::Gone> gone() const {
    const GroupMembers& members = *channel_.members_;
    std::optional<OutsideWait::Gone> left;
    for (int rank = next_; rank < last_; rank += step_) {
      // First look whether it is gone, then whether it arrived before it went.
      if (!members.is_gone(rank) || arrived(rank)) continue;
      if (members.has_ended(rank)) {
        return OutsideWait::Gone{FailureKind::kPeerEnded, members.transport_rank(rank)};
      }
      if (!left) left = {FailureKind::kPeerLeft, members.transport_rank(rank)};
    }
    return left;  // maybe because of one that has ended, which is named first
  }
  bool has_changed() const { return channel_.block(next_).left.value.load(std::memory_order_relaxed) != 0; }
  std::vector<int> late() const {
    std::vector<int> late;
    for (int rank = next_; rank < last_; rank += step_) {
      if (!arrived(rank)) late.push_back(channel_.members_->transport_rank(rank));
    }
    return late;
  }
  WaitPolicy policy() const { return policy_ ? *policy_ : channel_.policy_for(next_); }
  void before_sleep() {
    if (recorded_rank_ == next_) return;
    recorded_rank_ = next_;
    channel_.members_->record_wait(recorded_, next_, next_, word_(next_), value_);
  }

 private:
  // Acquire: pairs with the release store of publish(), announce() and their like.
  bool arrived(int rank) const { return word_(rank)->load(std::memory_order_acquire) >= value_; }

  HostChannel& channel_;
  const int last_;
  const int step_;
  const uint64_t value_;
  Word& word_;
  const std::optional<WaitPolicy> policy_;
  int next_;
  std::optional<RecordedWait> recorded_;
  int recorded_rank_ = -1;
};

template <class Word>
void HostChannel::await_ranks(int first, int last, int step, uint64_t value, Word&& word,
                              std::optional<WaitPolicy> policy) {
  RankWait<Word> wait(*this, first, last, step, value, word, policy);
  await(wait);
}

void HostChannel::await_outside(OutsideWait& outside) {
  /// Others see in `outside`, a word of this rank's block, how far it has come.
  struct Recorded {
    bool complete() { return outside.complete(); }
    std::optional<OutsideWait::Gone> gone() { return outside.gone(); }
    bool has_changed() const { return outside.has_changed(); }
    std::vector<int> late() const { return outside.late(); }
    WaitPolicy policy() const { return channel.outside_policy_; }
    void before_sleep() {
      if (const auto late = outside.late(); !late.empty() && late.front() != awaited) {
        awaited = late.front();
        const auto& word = channel.block(channel.rank_).outside.value;
        channel.members_->record_wait_for(recorded, awaited, channel.rank_, &word,
                                          word.load(std::memory_order_relaxed) + 1);
      }
      outside.before_sleep();
    }

    HostChannel& channel;
    OutsideWait& outside;
    std::optional<RecordedWait> recorded = std::nullopt;
    int awaited = -1;
  };
  Recorded wait{*this, outside};
  await(wait);
  block(rank_).outside.value.fetch_add(1, std::memory_order_release);
}

template <class Wait>
void HostChannel::await(Wait& wait) {
  const auto complete = [&] { return wait.complete(); };
  Doorbell& bell = doorbell();
  while (!complete()) {
    const uint32_t endings = transport().endings();
    // A rank that has gone after an abort is not the cause. Where it is seen to have gone, the abort that it has told of
    // is seen, too.
    auto gone = wait.gone();
    if (!gone || gone->kind == FailureKind::kPeerLeft) {
      // One that has left may have done so because of one that has ended.
      const auto outside = gone_outside();
      if (outside && (!gone || outside->kind == FailureKind::kPeerEnded)) gone = outside;
    }
    if (gone && !members_->is_aborted(sequence()) && give_up(gone->kind, gone->culprit, complete)) return;
    bool woken = false;
    try {
      woken = wait_until(
          bell, wait.policy(), deadline_,
          [&] {
            return wait.complete() || members_->fails(sequence()) || transport().endings() != endings ||
                   wait.has_changed() || lacks_a_member();
          },
          [&] { wait.before_sleep(); });
    } catch (...) {
      // An interruption (base/process/interrupt.h). It ends the operation for all, unless all flags are set
      // by now: then this wait is over, and the interruption reaches the caller after the operation.
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
    const auto abort = members_->aborted();
    if (abort && abort->sequence <= sequence() &&
        give_up(static_cast<FailureKind>(abort->kind), abort->culprit, complete)) {
      return;
    }
    if (!woken) {
      const auto late = wait.late();
      if (late.empty()) continue;  // they have come just now
      const int cause = transport().cause_of_waiting(late);
      if (members_->fails(sequence())) continue;  // another host has told why meanwhile
      if (give_up(FailureKind::kTimeout, cause, complete)) return;
    }
  }
}

std::optional<OutsideWait::Gone> HostChannel::gone_outside() const {
  const bool absent = lacks_a_member();
  if ((phase() == Phase::kAnnouncing || absent) && transport().endings() != 0 && ended_outside_) {
    if (const auto ended = ended_outside_()) return OutsideWait::Gone{FailureKind::kPeerEnded, *ended};
  }
  if (!absent) return std::nullopt;
  return OutsideWait::Gone{FailureKind::kPeerLeft, absent_rank_.load(std::memory_order_relaxed)};
}

std::optional<int> HostChannel::ended_member() {
  const uint32_t endings = transport().endings();
  if (endings == endings_of_others_) return std::nullopt;
  for (int rank = 0; rank < size(); ++rank) {
    if (members_->has_ended(rank)) return members_->transport_rank(rank);
  }
  if (const auto ended = ended_outside_ ? ended_outside_() : std::nullopt) return ended;
  endings_of_others_ = endings;
  return std::nullopt;
}

void HostChannel::note_absence(int rank, uint64_t first) {
  if (first >= first_absence_.load(std::memory_order_relaxed)) return;
  absent_rank_.store(rank, std::memory_order_relaxed);
  first_absence_.store(first, std::memory_order_release);
  members_->wake_waiters();
}

}  // namespace lockstep::transport
