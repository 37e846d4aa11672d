#pragma once

#include <optional>
#include <set>
#include <string>
#include <sys/types.h>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/worker_process.h>

namespace lockstep::launch {

/// A process of a program that has loaded its libraries and has run nothing of its own, from which the program's processes
/// are forked: each begins where the server stands, before main(), without the tenths of a second that loading LibTorch
/// takes, and shares the memory of what was loaded. What multiprocessing in Python calls a forkserver.
///
/// The program must be linked with this library, whose constructor takes requests in a process that has kVariable
/// (links_this_library() in program_libraries.h tells): any other would run its main() instead.
///
/// The server dies with the thread that made it, and with this object. What it forks dies with the launcher's main thread.
/// Not thread-safe.
class ForkServer {
 public:
  /// The server reads there which process started it, and the number of its socket.
  static constexpr const char* kVariable = "LOCKSTEP_FORK_SERVER";

  /// Starts a server of the program, with these arguments and this environment, of which libraries may read variables when
  /// they are loaded; standard streams and a cgroup are ignored. Throws c10::DistBackendError when the system refuses.
  explicit ForkServer(WorkerSpec program);

  /// Waits until the libraries are loaded, and returns true; false at the deadline, or when it has_ended(): they can't be loaded,
  /// or have started threads or opened files, which a fork would lose.
  bool await(const Deadline& deadline);

  /// Whether it takes no requests any more.
  bool has_ended();
  /// -1 after it has_ended().
  pid_t pid() const { return process_ ? process_->pid() : -1; }

  /// A WorkerSpec::make_process: forks a process as `spec` describes it, but for its program and arguments, with this
  /// process's working directory. forked_arguments() in it are those of `spec`. Nothing where the server has ended, or can't.
  std::optional<MadeProcess> fork(const WorkerSpec& spec);

 private:
  void end();

  UniqueFd line_;
  std::optional<WorkerProcess> process_;  // none: it has ended, and is reaped
  bool ready_ = false;
  std::set<std::string> environment_;  // of the server, but for what is its own
};

/// WorkerSpec::arguments of the process that a ForkServer forked; null in others. main() has the server's.
const std::vector<std::string>* forked_arguments();

}  // namespace lockstep::launch
