#include <chrono>
#include <initializer_list>
#include <sstream>
#include <stdlib.h>

#include <lockstep/base/environment.h>
#include <lockstep/launch/agent/dry_run.h>
#include <lockstep/launch/agent/shell_words.h>
#include <lockstep/launch/agent/worker_group.h>
#include <lockstep/rendezvous/exit_status_table.h>
#include <lockstep/rendezvous/network/network_interface.h>

namespace lockstep::launch {
namespace {

/// Local rank 0 has these variables; in parentheses stands what differs for others, or what only the start tells.
WorkerEnvironment described_environment(const RunOptions& options, const RankVariables& variables,
                                        bool hosts_meet) {
  WorkerEnvironment result = common_environment(options, 0);
  variables.apply(result);
  const auto describe = [&](std::initializer_list<const char*> names, const std::string& what) {
    for (const char* name : names) result.set(name, "(" + what + ")");
  };
  const std::string local_ranks = options.nprocs == 1 ? "0" : "0 to " + std::to_string(options.nprocs - 1);
  if (options.nprocs > 1) describe({"LOCAL_RANK", "RANK", "ROLE_RANK"}, local_ranks);
  if (options.virtual_local_rank) {
    result.set("LOCAL_RANK", "0");
    describe({"CUDA_VISIBLE_DEVICES"}, "the GPU of each process");
  }
  if (hosts_meet) {
    describe({"RANK", "ROLE_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
              "MASTER_ADDR", "MASTER_PORT"},
             "known when the hosts have met");
    describe({"TORCHELASTIC_RESTART_COUNT"}, "from 0");
    describe({"LOCKSTEP_AGENT_PORT"}, "the port at which the agents meet");
    if (!read_interface_wish(environment::text)) {
      describe({"LOCKSTEP_SOCKET_IFNAME"}, "this host's address for messages");
    }
  } else if (variables.store_port == 0) {
    describe({"MASTER_PORT"}, "a free port");
  }
  if (variables.run_id.empty()) describe({"TORCHELASTIC_RUN_ID"}, "a fresh name");
  describe({"LOCKSTEP_AGENT_STORE"}, "MASTER_ADDR:MASTER_PORT/TORCHELASTIC_RUN_ID");
  describe({"TORCHELASTIC_ERROR_FILE"}, "a file of each process");
  describe({ExitStatusTable::kVariable}, "a descriptor");
  return result;
}

}  // namespace

std::string describe_workers(const RunOptions& options, const RankVariables& variables, bool hosts_meet) {
  std::ostringstream text;
  text << "processes: " << options.nprocs << "\ncommand: " << shell_words(options.command)
       << "\nstart method: " << (options.forks_workers ? "forkserver" : "spawn")
       << "\ngrace period: " << std::chrono::duration<double>(options.grace_period).count() << " s"
       << "\nvariables that differ from this environment:\n";
  const WorkerEnvironment workers = described_environment(options, variables, hosts_meet);
  for (const auto& [name, value] : workers.variables()) {
    const char* here = ::getenv(name.c_str());
    if (here == nullptr || value != here) text << "  " << name << '=' << value << '\n';
  }
  for (const char* name : {"LOCKSTEP_JOB_SECRET", "LOCKSTEP_SPAWN", "LOCKSTEP_TERMINAL_COLUMNS"}) {
    if (::getenv(name) != nullptr && !workers.has(name)) text << "  " << name << " (not passed on)\n";
  }
  return text.str();
}

}  // namespace lockstep::launch
