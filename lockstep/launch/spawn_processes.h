#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/launch/spawn.h>
#include <lockstep/launch/supervisor.h>
#include <lockstep/launch/worker_process.h>

namespace lockstep::launch {

/// What spawn() and the test harness ask for.
struct SpawnRequest {
  SpawnOptions options;
  int nprocs = 1;
  std::vector<bool> may_fail = {};  // by rank: its failure does not end the others; empty: every failure does
  Deadline deadline = Deadline::never();
  // By rank: the descriptor that becomes its standard output and error. Empty: it has this process's.
  std::vector<int> outputs = {};
  MakeProcess make_process = {};  // see WorkerSpec
};

struct SpawnOutcome {
  pid_t pid = 0;
  int wait_status = 0;
  bool asked_to_end = false;             // it was still running when it was sent a signal
  bool reached = false;                  // it came to the call
  std::optional<std::string> exception;  // what its function threw

  /// Whether it failed by itself.
  bool failed() const { return exception || (!asked_to_end && (wait_status != 0 || !reached)); }
};

struct SpawnResult {
  std::vector<SpawnOutcome> outcomes;  // by rank
  std::vector<int> failed;             // ranks that failed by themselves, in order
  bool deadline_passed = false;
  std::optional<int> interrupted_by;
};

/// The core of spawn(). In the parent: starts the processes, waits for all, tells how they ended. In a child
/// at this very call: runs the function and does not return. In a child on its way to another call: nothing.
std::optional<SpawnResult> spawn_processes(const SpawnRequest& request,
                                           const std::function<void(int)>& function);

/// The failure of a rank in words, as torch.multiprocessing's spawn has them.
std::string describe_failure(int rank, const SpawnOutcome& outcome);

}  // namespace lockstep::launch
