#pragma once

#include <string>

#include <lockstep/launch/agent/agent.h>
#include <lockstep/launch/worker_environment.h>

namespace lockstep::launch {

/// For `lockstep run --dry-run`: the number of this host's workers, their command line as a shell takes it, and the
/// variables in which their environment differs from this process's, one in a line. What is decided when they start stands
/// there in parentheses; with `hosts_meet` that is all that the hosts agree on. No secret is told.
std::string describe_workers(const RunOptions& options, const RankVariables& variables, bool hosts_meet);

}  // namespace lockstep::launch
