#pragma once

#include <functional>
#include <optional>
#include <sys/types.h>
#include <vector>

#include <lockstep/launch/agent/agent.h>
#include <lockstep/launch/fork_server.h>
#include <lockstep/launch/worker_environment.h>

namespace lockstep::launch {

/// Has the workers of a host forked from one process that has loaded their program, where the program allows it: the libraries
/// are loaded once on each host instead of once for each worker, and workers that are started again need not load them at all.
/// Where it does not, or that process fails, workers are executed. Lives as long as workers may be started; use it in
/// the thread that starts them.
class WorkerForks {
 public:
  /// `again`: they may be started more than once.
  explicit WorkerForks(bool again) : again_(again) {}

  /// To be called before the workers of a start. `common`: the environment of all. Waits while libraries are loaded, unless
  /// `gives_up()`, which is asked now and then.
  void prepare(const RunOptions& options, const WorkerEnvironment& common,
               const std::function<bool()>& gives_up);
  /// For WorkerSpec.
  MakeProcess make_process();
  /// To be called after the workers of a start.
  void started();
  /// The process that stays between starts; none, or one. It is this process's child.
  std::vector<pid_t> pids() const;

 private:
  void start_server(const RunOptions& options, const WorkerEnvironment& common);

  bool again_;
  bool tried_ = false;  // whether this program can have a server
  std::optional<ForkServer> server_;
};

}  // namespace lockstep::launch
