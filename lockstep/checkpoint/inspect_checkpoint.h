#pragma once

#include <filesystem>
#include <string>

#include <lockstep/base/errors.h>

namespace lockstep {

/// What `lockstep inspect checkpoint` prints, and its exit status.
struct CheckpointInspection {
  std::string text;
  /// Damage or an incomplete checkpoint was found; or, of two checkpoints, a difference.
  bool problem = false;
};

struct InspectCheckpointOptions {
  bool verify = true;  ///< read everything and check the checksums; without it only manifest and sizes
  bool json = false;   ///< for programs
};

/// What a checkpoint holds: what it says of itself, files, tensors, and what is wrong with it. `directory`
/// may also hold many checkpoints; then a line for each. Throws CheckpointError when there is none.
/// Thread-safe.
CheckpointInspection inspect_checkpoint(const std::filesystem::path& directory,
                                        const InspectCheckpointOptions& options = {});

/// In what `second` differs from `first`: tensors that only one has, of another dtype or shape, or with other
/// elements (how many, and by how much at most); and values. Takes memory for two tensors at a time. Throws
/// CheckpointError when one can't be read, or tensors that must be compared are damaged. Thread-safe.
CheckpointInspection compare_checkpoints(const std::filesystem::path& first,
                                         const std::filesystem::path& second,
                                         const InspectCheckpointOptions& options = {});

}  // namespace lockstep
