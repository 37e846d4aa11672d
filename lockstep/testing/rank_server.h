#pragma once

#include <optional>
#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

#include <lockstep/launch/worker_process.h>

/// Ranks of tests without the third of a second that a program takes to load LibTorch: they are forked from a
/// launch::ForkServer of the test program.
namespace lockstep::testing {

/// To be called first in main(). Remembers what the program was started with. In a process that was forked from the
/// server it changes `argc` and `argv` to what was asked for.
void start_as_rank_or_return(int& argc, char**& argv);

/// Whether a process that starts now, with these changes to the environment, would be as one forked from the
/// server: limits are as they were when the program started, and so are the variables that libraries read
/// when they are loaded. Never under ThreadSanitizer, which has a thread of its own.
bool can_fork_rank(const std::vector<std::pair<std::string, std::optional<std::string>>>& changes);

/// A WorkerSpec::make_process that forks from the server, which is started at the first call. Not thread-safe.
std::optional<launch::MadeProcess> fork_rank(const launch::WorkerSpec& spec);

/// Ends the server, which is a child of this process, for tests that count children. The next fork_rank()
/// starts one.
void stop_rank_server();

}  // namespace lockstep::testing
