#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace lockstep::doctor::internal {

/// How a helper program ended.
struct CommandResult {
  bool started = false;
  bool timed_out = false;  ///< it was killed
  int exit_status = -1;    ///< -1: it did not exit by itself
  std::string output;      ///< standard output and error, the first MiB

  bool succeeded() const { return started && !timed_out && exit_status == 0; }
};

/// Runs a program (argv[0] is a path) without input, in the C locale, and kills it after `timeout`. Returns
/// once it has ended; a process that it left behind does not keep us. Never throws for what the program does.
CommandResult run_command(const std::vector<std::string>& argv, std::chrono::nanoseconds timeout);

}  // namespace lockstep::doctor::internal
