#pragma once

#include <filesystem>

#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep::checkpoint::internal {

/// A directory that is written beside the place where it shall be, and gets its name when it is whole. Its
/// writer holds a lock (flock) on it, which the kernel takes back when the writer dies, however it dies: so
/// others know which are left over. Not thread-safe.
class TemporaryDirectory {
 public:
  /// Makes one for `destination`, and its parents where they are missing, after removing what dead writers
  /// have left beside it. Throws CheckpointError.
  explicit TemporaryDirectory(std::filesystem::path destination);
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  /// Removes it, unless it was published.
  ~TemporaryDirectory();

  const std::filesystem::path& path() const { return path_; }

  /// Renames it to its destination, in one step also when it replaces what is there (`overwrite`). Where the
  /// file system can't exchange names (NFS), what is there is moved to replaced_name() first, which is listed
  /// like any checkpoint: so a good one is there at any moment. With `sync` the directory and its parent are
  /// synced before and after. Throws CheckpointError when there is something already, and it must not or
  /// can't be replaced.
  void publish(bool overwrite, bool sync);

 private:
  std::filesystem::path replace(bool overwrite);

  std::filesystem::path destination_;
  std::filesystem::path path_;
  UniqueFd lock_;
  ForkGuard fork_guard_;  // a forked child must not remove what its parent writes
};

/// Whether a TemporaryDirectory calls itself so, one of a living writer or of a dead one.
bool is_temporary_name(const std::filesystem::path& directory);

/// Removes temporary directories in `parent` whose writers are dead. Never throws.
void remove_left_overs(const std::filesystem::path& parent);

/// Removes a directory so that no process sees a part of it: it loses its name first. Throws CheckpointError.
void remove_checkpoint_directory(const std::filesystem::path& directory);

}  // namespace lockstep::checkpoint::internal
