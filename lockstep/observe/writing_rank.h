#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace lockstep {

/// Whether this process is the one that writes: rank 0 of the default group. Without a group, the last one's
/// rank counts, so that a rank writes nothing after destroy_process_group(); before the first, what the
/// launcher's variables say (RANK and others); and without all of them a process is alone and writes. After
/// shrink_group() the new rank 0 takes over. Thread-safe.
class WritingRank {
 public:
  /// `told`: a decision of the program's own, for all ranks' files, say.
  explicit WritingRank(std::optional<bool> told = std::nullopt);
  /// Asks anew at each call; some nanoseconds.
  bool here();

 private:
  std::optional<bool> told_;
  std::atomic<int32_t> rank_{0};
};

}  // namespace lockstep
