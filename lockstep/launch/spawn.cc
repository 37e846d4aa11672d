#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include <c10/util/Exception.h>

#include <lockstep/launch/spawn.h>
#include <lockstep/launch/spawn_processes.h>

namespace lockstep::launch::internal {

void spawn(const SpawnOptions& options, int nprocs, const std::function<void(int)>& function) {
  const auto result = launch::spawn_processes({.options = options, .nprocs = nprocs}, function);
  if (!result) return;
  if (result->interrupted_by) {
    // The program's own handler, or the default, now gets what was kept from it while the children ended.
    ::raise(*result->interrupted_by);
    TORCH_CHECK(false, "spawn() was interrupted by signal ", *result->interrupted_by,
                "; its processes were ended");
  }
  if (result->failed.empty()) return;
  const int rank = result->failed.front();
  const launch::SpawnOutcome& outcome = result->outcomes[static_cast<size_t>(rank)];
  const std::string text = launch::describe_failure(rank, outcome);
  if (outcome.exception) throw ProcessRaisedException(text, rank, outcome.pid);
  if (!WIFSIGNALED(outcome.wait_status)) {
    throw ProcessExitedException(text, rank, outcome.pid, WEXITSTATUS(outcome.wait_status));
  }
  const int signal = WTERMSIG(outcome.wait_status);
  const char* name = ::sigabbrev_np(signal);
  throw ProcessExitedException(text, rank, outcome.pid, -signal,
                               name == nullptr ? std::to_string(signal) : "SIG" + std::string(name));
}

}  // namespace lockstep::launch::internal
