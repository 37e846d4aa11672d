#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include <lockstep/base/process/fork_guard.h>

namespace lockstep::checkpoint::internal {

/// The name of the lock's file. It stays in the folder.
constexpr const char* kLockName = ".lockstep-lock";

/// The right to save into a folder, which one process at a time has: two jobs in one folder would replace and
/// remove each other's checkpoints.
///
/// It is a lock of fcntl(2) on a file, which NFS knows and which the kernel takes back when its process ends,
/// however it ends. The file says which process has it, for others' errors. Where the file system knows no
/// locks, that text decides: a process that lives on this host has it, and of other hosts nothing is known,
/// so there it is only a warning. Several in one process share it. Thread-safe.
class FolderLock {
 public:
  /// Makes the folder where it is missing. Throws CheckpointError that names the host and the process that
  /// has it, after waiting for it: 20 seconds for a process of this host, which may just be ending, and two
  /// minutes for one of another host, as long as an NFS server may keep the locks of a host that has crashed;
  /// but never more than `most`. Throws the Interruption that ends the wait. Null, with a warning, where
  /// nothing can be written anyway.
  static std::unique_ptr<FolderLock> acquire(const std::filesystem::path& folder,
                                             std::chrono::nanoseconds most = std::chrono::nanoseconds::max());

  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

 private:
  explicit FolderLock(std::string key) : key_(std::move(key)) {}

  std::string key_;       // in the registry of this process
  ForkGuard fork_guard_;  // a forked child has not got it
};

}  // namespace lockstep::checkpoint::internal
