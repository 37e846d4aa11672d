#pragma once

#include <optional>
#include <string>

#include <lockstep/base/unique_fd.h>

namespace lockstep::launch {

/// Kills all processes of a cgroup by its file cgroup.kill. Async-signal-safe.
void kill_cgroup(const char* kill_file);

/// A cgroup for the workers of one start, below that of this process: what a worker starts stays in it, whatever process
/// group or session it makes, and ends with the workers. Version 2 alone can kill a cgroup. Not thread-safe; movable.
class WorkerCgroup {
 public:
  /// Nothing where there is no version 2, or this process may not make cgroups there: it needs root, or a cgroup that was
  /// delegated to its user, and Linux 5.14. Removes what WorkerCgroups of processes that were killed, with their guardians,
  /// have left there, where no process is in it.
  static std::optional<WorkerCgroup> make();

  WorkerCgroup(WorkerCgroup&& other) noexcept;
  WorkerCgroup& operator=(WorkerCgroup&&) = delete;
  /// Kills what is left in it, and removes it with those below it. Waits for at most 5 s until the kernel has ended the
  /// processes.
  ~WorkerCgroup();

  const std::string& folder() const { return folder_; }
  /// For clone3(2), which starts a process in the cgroup.
  int fd() const { return fd_.get(); }
  void kill() const;

 private:
  WorkerCgroup(std::string folder, UniqueFd fd) : folder_(std::move(folder)), fd_(std::move(fd)) {}

  std::string folder_;  // empty: moved from
  UniqueFd fd_;
};

/// Removes a cgroup, and those below it, once their processes have ended, within 5 s. Async-signal-safe.
void remove_cgroup(const char* folder);

}  // namespace lockstep::launch
