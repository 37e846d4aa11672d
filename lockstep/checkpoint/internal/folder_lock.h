#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include <lockstep/base/process/fork_guard.h>

namespace lockstep::checkpoint::internal {

/// The name of the lock's file. It stays in the folder.
constexpr const char* kLockName = ".lockstep-lock";

/// For whom a folder's lock is.
struct FolderOwner {
  std::string job = {};          // the same on all ranks of a job; empty: takes over from no process
  int64_t generation = 0;        // how often the job has gone on without some of its ranks; only grows
  bool shares_with_own = false;  // takes over also from one of the same generation
};

/// The right to save into a folder, which one process at a time has: two jobs in one folder would replace and
/// remove each other's checkpoints.
///
/// It is a lock of fcntl(2) on a file, which NFS knows and which the kernel takes back when its process ends,
/// however it ends. The file says which process has it, for others' errors. Where the file system knows no
/// locks, that text decides: a process that lives on this host has it, and of other hosts nothing is known,
/// so there it is only a warning. Several in one process share it. Thread-safe.
///
/// A job that has gone on without the process that has it takes it over, though that one may live, cut off from the others:
/// the file says of which job and generation its process is, and of one job the later generation counts. Before a
/// checkpoint gets its name check() reads which process has it. So a process from which it was taken saves nothing more,
/// but for what it had begun to name at that very moment.
class FolderLock {
 public:
  /// Makes the folder where it is missing. Throws CheckpointError that names the host and the process that
  /// has it, after waiting for it: 20 seconds for a process of this host, which may just be ending, and two
  /// minutes for one of another host, as long as an NFS server may keep the locks of a host that has crashed;
  /// but never more than `most`. Throws the Interruption that ends the wait. Null, with a warning, where
  /// nothing can be written anyway.
  static std::unique_ptr<FolderLock> acquire(const std::filesystem::path& folder,
                                             std::chrono::nanoseconds most = std::chrono::nanoseconds::max(),
                                             const FolderOwner& owner = {});

  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

  /// Throws CheckpointError, with the process that has it now, when it was taken over.
  void check() const;
  /// For one that saves without the lock: throws it when the job has gone on without `owner`.
  static void check_without(const std::filesystem::path& folder, const FolderOwner& owner);

 private:
  explicit FolderLock(std::string key) : key_(std::move(key)) {}

  std::string key_;       // in the registry of this process
  ForkGuard fork_guard_;  // a forked child has not got it
};

}  // namespace lockstep::checkpoint::internal
