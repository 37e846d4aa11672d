#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/checkpoint_manager.h>

namespace lockstep::checkpoint::internal {

/// One that a manager may remove.
struct ManagedCheckpoint {
  CheckpointInfo info;
  int64_t written = 0;  ///< the number of this manager's save; 0: an earlier run wrote it
};

/// What is known of a checkpoint; kUnknown: it could not be read, or was not looked at.
enum class Condition { kGood, kDamaged, kUnknown };
using ConditionOf = std::function<Condition(const CheckpointInfo&)>;

/// Which of a manager's checkpoints may go. A function of what there is, the options and `condition_of`.
///
/// Kept are the last `keep_last` good ones that were saved by plan, the `keep_best` best good ones of those
/// that have the metric (of equal ones the newer), the last `keep_emergency` good ones saved in an emergency,
/// those of the steps of `keep_period`, and those in `keep_also`. "Last" is meant both by step and by the
/// order of writing (a run may have gone back, past damaged ones); the clock, which may jump, has no say. One
/// that is not good takes no good one's place: it goes when enough good ones are newer, unless `keep_period`
/// keeps it. One of unknown condition may be good, so it is also kept where it would be among the best.
/// `condition_of` is only called when there may be something to remove.
std::vector<CheckpointInfo> checkpoints_to_remove(const std::vector<ManagedCheckpoint>& there,
                                                  const CheckpointManagerOptions& options,
                                                  const std::vector<std::filesystem::path>& keep_also,
                                                  const ConditionOf& condition_of);

}  // namespace lockstep::checkpoint::internal
