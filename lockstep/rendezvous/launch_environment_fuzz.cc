// What launchers leave in the environment, and init methods: any text is understood or a c10::ValueError.
//
// The input is lines NAME=VALUE; the line "method=…" is the init_method, "options=RANK" the rank in the
// options.
#include <cstddef>
#include <cstdlib>
#include <map>
#include <string>
#include <variant>

#include <c10/util/Exception.h>

#include <lockstep/rendezvous/internal/hostlist.h>
#include <lockstep/rendezvous/internal/plan.h>
#include <lockstep/rendezvous/launch_environment.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::launch_environment_fuzz {
namespace {

std::map<std::string, std::string> parse_lines(const std::string& text) {
  std::map<std::string, std::string> variables;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    const size_t equals = line.find('=');
    if (equals != std::string::npos) variables[line.substr(0, equals)] = line.substr(equals + 1);
    begin = end + 1;
  }
  return variables;
}

void check(const rendezvous_internal::RendezvousPlan& plan) {
  if (plan.rank < 0 || plan.world_size < 1 || plan.rank >= plan.world_size) std::abort();
  if (std::holds_alternative<NoMeeting>(plan.meeting)) std::abort();
  const auto* tcp = std::get_if<TcpMeeting>(&plan.meeting);
  if (tcp != nullptr && tcp->host.empty()) std::abort();
}

void plan_with(const std::map<std::string, std::string>& variables) {
  try {
    const auto environment = read_launch_environment([&](const char* name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      if (found == variables.end()) return std::nullopt;
      return found->second;
    });
    RendezvousOptions options;
    if (const auto method = variables.find("method"); method != variables.end()) {
      options.init_method = method->second;
    }
    if (const auto rank = variables.find("options"); rank != variables.end()) {
      options.rank = static_cast<int>(rank->second.size());
      options.world_size = options.rank + 1;
    }
    check(rendezvous_internal::make_plan(options, environment, "program"));
  } catch (const c10::ValueError&) {
    // what is documented
  }
}

void expand(const std::string& list) {
  try {
    const auto hosts = rendezvous_internal::expand_hostlist(list);
    if (hosts.empty() || hosts.size() > 65536) std::abort();
    for (const auto& host : hosts) {
      if (host.empty()) std::abort();
    }
  } catch (const c10::ValueError&) {
  }
  try {
    const auto counts = rendezvous_internal::expand_tasks_per_node(list);
    if (counts.size() > 65536) std::abort();
    for (const int count : counts) {
      if (count < 0) std::abort();
    }
  } catch (const c10::ValueError&) {
  }
}

std::vector<std::string> seeds() {
  return {
      "RANK=1\nWORLD_SIZE=4\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=localhost\nMASTER_PORT=29500\n"
      "TORCHELASTIC_USE_AGENT_STORE=True\nTORCHELASTIC_RUN_ID=none\nTORCHELASTIC_RESTART_COUNT=2\n"
      "LOCKSTEP_AGENT_STORE=127.0.0.1:29500/none\n",
      "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=0\n"
      "OMPI_COMM_WORLD_LOCAL_SIZE=2\nPMIX_NAMESPACE=job\n",
      "SLURM_PROCID=3\nSLURM_STEP_NUM_TASKS=4\nSLURM_LOCALID=1\nSLURM_NODEID=1\n"
      "SLURM_STEP_TASKS_PER_NODE=2(x2)\nSLURM_STEP_NODELIST=node[01-02]\nSLURM_JOB_ID=77\nSLURM_STEP_ID=0\n",
      "PMI_RANK=1\nPMI_SIZE=2\nMPI_LOCALRANKID=1\nMPI_LOCALNRANKS=2\nMASTER_ADDR=a\nMASTER_PORT=1\n",
      "method=tcp://[::1]:29500?rank=1&world_size=2&use_libuv=0\n",
      "method=tcp://host:1/\noptions=x\n",
      "method=file:///tmp/x?world_size=2&rank=0",
      "method=env://?rank=0&world_size=1",
      "rack[1-2]node[01-03,7],other",
      "2(x3),1,16(x2)",
  };
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(launch_environment, seeds) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  plan_with(parse_lines(text));
  expand(text);
  return 0;
}

}  // namespace lockstep::launch_environment_fuzz
