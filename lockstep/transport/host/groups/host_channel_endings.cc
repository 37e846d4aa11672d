// How an operation of a HostChannel ends: by what all ranks agree on it, and what each of them then throws.
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/transport/host/groups/host_channel.h>
#include <lockstep/transport/host/groups/operation_outcome.h>

namespace lockstep::transport {

void HostChannel::refuse(const std::string& text) {
  members_->fail(FailureKind::kMismatch, members_->transport_rank(rank_), sequence());
  if (!failure_) {
    failure_.emplace(FailureKind::kMismatch, text);
    if (on_failure_) on_failure_({FailureKind::kMismatch, members_->transport_rank(rank_), sequence(), text});
  }
  throw *failure_;
}

/// True if what this rank waits for has come after all, so that it goes on.
bool HostChannel::give_up(FailureKind kind, int culprit, const std::function<bool()>& complete) {
  using Step = OperationOutcome::Phase;
  std::vector<int> late;
  OperationOutcome outcome(members_->outcome(), rank_, sequence());
  outcome.give_up(kind, culprit);
  while (outcome.is_stepping()) {
    if (outcome.phase() == Step::kDeciding) {
      failpoint::here("give_up");
      late = not_announced();
    }
    if (outcome.step(complete)) members_->tell_failure();
  }
  if (outcome.phase() == Step::kFailed) fail_as_decided(late);
  TORCH_INTERNAL_ASSERT(complete());
  return true;
}

void HostChannel::commit() {
  OperationOutcome outcome(members_->outcome(), rank_, sequence());
  outcome.see_all();
  while (outcome.is_stepping()) outcome.step([] { return true; });
  if (outcome.phase() == OperationOutcome::Phase::kFailed) fail_as_decided({});
  enter(Phase::kConcluded);
}

std::vector<int> HostChannel::not_announced() const {
  std::vector<int> late;
  for (int rank = 0; rank < size(); ++rank) {
    const bool arrived = phase() == Phase::kJoining
                             ? block(rank).joined.value.load(std::memory_order_acquire) != 0
                             : slot(rank).sequence.load(std::memory_order_acquire) >= sequence();
    if (!arrived) late.push_back(rank);
  }
  return late;
}

void HostChannel::fail_as_decided(const std::vector<int>& late) {
  enter(Phase::kConcluded);
  if (!failure_) {
    failure_.emplace(members_->describe_failure(late, timeout_));
    if (on_failure_) on_failure_(failure_for_others(late));
  }
  throw *failure_;
}

GroupFailure HostChannel::failure_for_others(const std::vector<int>& late) const {
  const ChannelError error = members_->describe_failure(late, {}, /*to_others=*/true);
  const Decision decided = members_->cause();
  return {error.kind(), decided.culprit, decided.sequence, error.what()};
}

}  // namespace lockstep::transport
