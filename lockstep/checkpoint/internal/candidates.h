#pragma once

#include <filesystem>
#include <vector>

#include <lockstep/checkpoint/checkpoint.h>

namespace lockstep::internal {

/// list_checkpoints(), with a warning in the log for each that has to be skipped, and why.
std::vector<CheckpointInfo> candidates(const std::filesystem::path& root);

}  // namespace lockstep::internal
