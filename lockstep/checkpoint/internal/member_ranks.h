#pragma once

#include <chrono>
#include <vector>

#include <ATen/core/ivalue.h>

#include <lockstep/collectives/process_group.h>

namespace lockstep::checkpoint::internal {

/// The ranks that save together, by their numbers in the group; perhaps this process alone, whose
/// "collectives" then do not communicate. As thread-safe as the group.
class MemberRanks {
 public:
  /// An empty group is the default group, or this process alone if there is none. With `alone` nothing is
  /// ever said to others, and rank() and group_size() are as in the group. Throws c10::ValueError on a rank
  /// that is not in the group.
  explicit MemberRanks(ProcessGroup group = {}, bool alone = false);
  /// This process alone, as if it were in a group: for when the group is gone.
  MemberRanks(int rank, int group_size) : rank_(rank), group_size_(group_size) {}

  int rank() const { return rank_; }
  /// The number of those that talk with each other: 1 if alone.
  int size() const { return talks_ ? group_size_ : 1; }
  int group_size() const { return group_size_; }
  /// Whether this is the one that the others follow.
  bool leads() const { return !talks_ || rank_ == 0; }
  const ProcessGroup& group() const { return group_; }
  /// How long the others wait for this one; without end if alone.
  std::chrono::nanoseconds timeout() const;

  /// On the leader all ranks' objects, by rank; elsewhere nothing.
  std::vector<c10::IValue> gather(const c10::IValue& object) const;
  /// The leader's object for this rank; `objects` count on the leader alone, one for each rank.
  c10::IValue scatter(const std::vector<c10::IValue>& objects) const;
  /// The leader's object.
  c10::IValue broadcast(const c10::IValue& object) const;
  /// All ranks' objects, by rank, on all ranks.
  std::vector<c10::IValue> all_gather(const c10::IValue& object) const;

 private:
  ProcessGroup group_;
  bool talks_ = false;
  int rank_ = 0;
  int group_size_ = 1;
};

}  // namespace lockstep::checkpoint::internal
