#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::rendezvous_internal {

/// Expands Slurm's notation: "node[01-03,7],other" → node01 node02 node03 node7 other. Several brackets in
/// one name multiply ("r[1-2]n[1-2]"), the rightmost running fastest. Throws c10::ValueError that shows the
/// list when it is malformed, empty, or longer than 65536 hosts.
std::vector<std::string> expand_hostlist(std::string_view list);

/// Expands Slurm's counts per node: "2(x3),1" → 2 2 2 1. Throws c10::ValueError as above.
std::vector<int> expand_tasks_per_node(std::string_view list);

}  // namespace lockstep::rendezvous_internal
