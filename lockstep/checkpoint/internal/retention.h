#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/checkpoint_manager.h>

namespace lockstep::internal {

/// Which of a manager's checkpoints may go. A pure function of what there is and the options.
///
/// Kept are the last `keep_last` that were saved by plan, the `keep_best` best of those that have the metric
/// (of equal ones the newer), the last `keep_emergency` saved in an emergency, and those in `keep_also`. What
/// was saved later is newer, whatever the step: a run may have gone back, past damaged ones.
std::vector<CheckpointInfo> checkpoints_to_remove(std::vector<CheckpointInfo> there,
                                                  const CheckpointManagerOptions& options,
                                                  const std::vector<std::filesystem::path>& keep_also);

}  // namespace lockstep::internal
