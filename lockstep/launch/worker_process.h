#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/guardian.h>

namespace lockstep::launch {

struct WorkerSpec;

/// A process that waits for a byte before its program begins, and ends where there will be none.
struct MadeProcess {
  pid_t pid = -1;
  UniqueFd go;  // a socket
};

/// Makes a worker's process by other means than fork(2) and execve(2): a child of the calling process, the
/// leader of a process group of its own. Nothing: it can't, and those are to do it.
using MakeProcess = std::function<std::optional<MadeProcess>(const WorkerSpec&)>;

/// What to start, and with what.
struct WorkerSpec {
  std::string program;                         // a path for execve(2); see find_program
  std::vector<std::string> arguments;          // argv, argv[0] included
  std::vector<std::string> environment;        // "NAME=value"
  std::array<int, 3> standard = {-1, -1, -1};  // become descriptors 0, 1, 2; -1: as this process has it
  std::vector<int> inherited = {};  // stay open under their numbers (3 or more); all others are closed
  MakeProcess make_process = {};    // empty: fork and execve
  std::vector<int> cores = {};      // on which it stays; empty: those of this process
  int cgroup =
      -1;  // the folder of one of version 2 in which it starts, where the kernel lets it; -1: as this process
};

/// Raises this process's limit on open files as far as its user may. Workers that it starts later get the limit that it had.
/// Not thread-safe.
void raise_open_files_limit();

/// fork(2) into this cgroup, or into that of this process where there is none or the kernel refuses. To move a process later
/// takes the kernel some milliseconds. The handlers of pthread_atfork(3) may not have run.
pid_t fork_into(int cgroup);

/// One started worker. It leads a process group of its own, has default signal dispositions and an empty
/// mask, dies with the thread that started it (PR_SET_PDEATHSIG), and is in the guardian's care, where there is
/// one, before its program begins.
///
/// It stays unreaped until reap(): so long its pid and its process group can't be given to another process,
/// and signals to the group reach exactly what the worker left there. Not thread-safe; movable.
class WorkerProcess {
 public:
  /// Starts it and returns once its program runs, or may run where make_process has made it. Throws c10::DistBackendError when fork or exec fail.
  static WorkerProcess start(const WorkerSpec& spec, const Guardian* guardian);

  WorkerProcess(WorkerProcess&& other) noexcept;
  WorkerProcess& operator=(WorkerProcess&&) = delete;
  /// Kills and reaps the group when reap() was not called.
  ~WorkerProcess();

  pid_t pid() const { return pid_; }
  /// Becomes readable when the worker ends.
  int pidfd() const { return pidfd_.get(); }
  /// Its wait status once it has ended; nothing while it runs. Does not block.
  std::optional<int> wait_status();
  /// Sends a signal to the worker's process group. Nothing happens when no process is left in it.
  void signal_group(int signal) const;
  /// Kills what is left in the group and gives the pid back; blocks until the worker has ended.
  void reap();

 private:
  WorkerProcess(pid_t pid, UniqueFd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}

  pid_t pid_ = -1;  // -1: reaped, or moved from
  UniqueFd pidfd_;
  std::optional<int> status_;
};

}  // namespace lockstep::launch
