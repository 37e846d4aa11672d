#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <sys/types.h>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep {

/// A process of spawn() failed (torch.multiprocessing.ProcessException).
class ProcessException : public std::runtime_error {
 public:
  ProcessException(const std::string& message, int error_index, pid_t error_pid)
      : std::runtime_error(message), error_index_(error_index), error_pid_(error_pid) {}
  /// Its rank.
  int error_index() const { return error_index_; }
  pid_t error_pid() const { return error_pid_; }

 private:
  int error_index_;
  pid_t error_pid_;
};

/// The function threw: what() holds the exception's type and message.
class ProcessRaisedException : public ProcessException {
 public:
  using ProcessException::ProcessException;
};

/// The process was killed by a signal or exited by itself.
class ProcessExitedException : public ProcessException {
 public:
  ProcessExitedException(const std::string& message, int error_index, pid_t error_pid, int exit_code,
                         std::optional<std::string> signal_name = std::nullopt)
      : ProcessException(message, error_index, error_pid),
        exit_code_(exit_code),
        signal_name_(std::move(signal_name)) {}
  /// Its exit status, or minus the number of the signal that killed it.
  int exit_code() const { return exit_code_; }
  /// "SIGKILL"; nothing when it exited.
  const std::optional<std::string>& signal_name() const { return signal_name_; }

 private:
  int exit_code_;
  std::optional<std::string> signal_name_;
};

struct SpawnOptions {
  /// The children's arguments, argv[0] included; empty: this process's own.
  std::vector<std::string> argv = {};
  /// What tells this call from the others in a child. Empty: its place among the calls without a label,
  /// counted from the start of the process. Needed when argv leads the children another way to this call.
  std::string label = {};
  /// From the first failure to SIGKILL for those that still run (SIGTERM comes in between).
  std::chrono::nanoseconds grace_period = std::chrono::seconds(30);
  /// Environment variables to set for the children, or to remove (nullopt).
  std::vector<std::pair<std::string, std::optional<std::string>>> environment = {};
};

namespace launch::internal {
void spawn(const SpawnOptions& options, int nprocs, const std::function<void(int)>& function);
}

/// Runs function(rank, args…) in `nprocs` processes and returns when all have ended:
/// torch.multiprocessing.spawn for C++. Inside the function init_process_group() needs no arguments: RANK,
/// WORLD_SIZE, MASTER_ADDR and the rest are set, and this process hosts the store.
///
///     int main() {
///       lockstep::spawn(train, 4, std::string("data"));   // void train(int rank, const std::string& folder)
///     }
///
/// Each child is this program started again, with the same arguments, environment and working directory. It
/// runs up to the same call, calls the function there, and ends with status 0 when that returns: code after
/// the call is the parent's alone. Therefore
/// - code before the call runs in every child: keep it free of effects that must happen once (writing files,
///   printing);
/// - it must lead to the same call: calls of spawn() are counted (in the order of one thread), and earlier
///   ones return at once in a child;
/// - arguments are evaluated in each child: pass anything that can be computed again, but nothing that lives
///   in this process only, such as open sockets, descriptors, database connections, or a generator's state;
/// - local variables of the callers are not destroyed in the children; objects of static duration are.
/// Children read /dev/null, write where this process writes, and die with it, however it ends. SIGINT,
/// SIGTERM, SIGHUP and SIGQUIT are passed on to them; when they have ended, this process gets the signal
/// again.
///
/// Throws ProcessRaisedException or ProcessExitedException for the rank that failed first, after the others
/// were ended (see SpawnOptions::grace_period), c10::ValueError for nprocs < 1, and c10::Error inside a
/// function that spawn() itself started: start all processes with one call. Under `lockstep run` each
/// worker's spawn() makes a job of its own. The calling thread must not end before the call returns; not to
/// be called by two threads at once without labels.
template <typename Function, typename... Args>
requires std::is_invocable_v<Function&, int, Args&...>
void spawn(const SpawnOptions& options, Function&& function, int nprocs, Args&&... args) {
  launch::internal::spawn(options, nprocs, [&](int rank) { std::invoke(function, rank, args...); });
}

template <typename Function, typename... Args>
requires std::is_invocable_v<Function&, int, Args&...>
void spawn(Function&& function, int nprocs, Args&&... args) {
  launch::internal::spawn({}, nprocs, [&](int rank) { std::invoke(function, rank, args...); });
}

}  // namespace lockstep
