#pragma once

#include <optional>
#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

#include <lockstep/launch/worker_process.h>

/// Ranks of tests without the third of a second that a program takes to load LibTorch: they are forked from a
/// process that has loaded the test program, has one thread and has run nothing of it.
namespace lockstep::testing {

/// To be called first in main(). Remembers what the program was started with. In the server itself it returns
/// only in the processes that are forked from it, with `argc`, `argv` and the environment as they were asked
/// for.
void start_as_rank_or_return(int& argc, char**& argv);

/// Whether a process that starts now, with these changes to the environment, would be as one forked from the
/// server: limits are as they were when the program started, and so are the variables that libraries read
/// when they are loaded. Never under ThreadSanitizer, which has a thread of its own.
bool can_fork_rank(const std::vector<std::pair<std::string, std::optional<std::string>>>& changes);

/// A process as `spec` describes it, forked from the server, which is started at the first call; a child of
/// the calling process, the leader of a process group. Throws std::runtime_error when the system refuses. Not
/// thread-safe.
pid_t fork_rank(const launch::WorkerSpec& spec);

/// Ends the server, which is a child of this process, for tests that count children. The next fork_rank()
/// starts one.
void stop_rank_server();

}  // namespace lockstep::testing
