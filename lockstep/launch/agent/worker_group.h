#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <lockstep/launch/agent/agent.h>
#include <lockstep/launch/agent/worker_forks.h>
#include <lockstep/launch/supervisor.h>
#include <lockstep/launch/worker_environment.h>

namespace lockstep::launch {

/// How the workers of one host ended.
struct GroupEnd {
  int exit_status = 0;  // as run() returns it
  // Tells of the rank that failed, and where this host's flight records are; empty where no rank failed by itself.
  std::string report;
  std::optional<int> far_culprit = {};  // the rank on another host because of which it did
};

/// Decides on a host's workers while they run, beside the agent: the coordinator of a job on several hosts.
class WorkerControl {
 public:
  virtual ~WorkerControl() = default;
  /// Becomes readable when serve() is to be called.
  virtual int fd() const = 0;
  /// Is called for that, and now and then.
  virtual void serve(Supervisor& supervisor) = 0;
  /// Whether the workers' guardian has killed those that still ran, or will, for want of its word: that end is no failure
  /// of theirs.
  virtual bool has_lapsed() { return false; }
  /// Is called once the workers have ended, and before their output is written to its end: a terminal that is stopped keeps
  /// nothing from the other hosts.
  virtual void ended(const GroupEnd& end) = 0;
  /// That of these workers and of later ones.
  virtual std::shared_ptr<ExitStatusTable> exit_status() const = 0;
};

/// What all workers of a host have, but for RankVariables and what is of the moment. `columns`: of the terminal that a
/// progress bar may have; 0: none.
WorkerEnvironment common_environment(const RunOptions& options, size_t columns);

/// Starts the workers of this host, by checked_options(), and sees them to their end, as run() describes it.
/// `variables` say who they are, but for their local ranks and the store's port: that is what `open_store` returns.
/// It is called once signals are taken, and before the first worker; the store must outlive this call. `adjust`
/// changes a worker's environment; it, `control` and `forks` may be missing.
GroupEnd run_workers(const RunOptions& options, RankVariables variables,
                     const std::function<uint16_t(Supervisor&)>& open_store,
                     const std::function<void(WorkerEnvironment&)>& adjust = {},
                     WorkerControl* control = nullptr, WorkerForks* forks = nullptr);

}  // namespace lockstep::launch
