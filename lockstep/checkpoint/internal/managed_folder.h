#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/checkpoint/internal/retention.h>

namespace lockstep::checkpoint::internal {

/// What a manager knows of the checkpoints in its folder, and how it removes old ones. Used by one thread at a time.
class ManagedFolder {
 public:
  /// `options` outlive it.
  explicit ManagedFolder(const CheckpointManagerOptions& options) : options_(options) {}

  /// This manager has written it.
  void note_written(const std::filesystem::path& directory) { written_[directory] = ++writes_; }
  /// One that this manager has not written was read as a whole.
  void note_good(const std::filesystem::path& directory) { good_.insert(directory); }
  void note_damaged(const std::filesystem::path& directory) { damaged_.insert(directory); }

  /// Removes what the options do not keep, until `cancelled`. What can't be removed is a nuisance, and no reason to end a
  /// training.
  void remove_old(const CheckpointInfo& newest, const std::atomic<bool>& cancelled);

 private:
  /// Whether it may take the place of an older one. Of what this manager has not written all is read, once.
  Condition condition_of(const CheckpointInfo& info, const std::atomic<bool>& cancelled);

  const CheckpointManagerOptions& options_;
  std::map<std::filesystem::path, int64_t> written_;  // the number of the save
  int64_t writes_ = 0;
  std::set<std::filesystem::path> good_, damaged_;  // of those that this manager has not written
};

}  // namespace lockstep::checkpoint::internal
