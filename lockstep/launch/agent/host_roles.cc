#include <algorithm>
#include <limits>
#include <variant>
#include <vector>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/launch/agent/host_roles.h>

namespace lockstep::launch {
namespace {

constexpr const char* kAlone = ", or --standalone, which runs a job of this host alone";

class RolesReader {
 public:
  RolesReader(const Lookup& lookup, const GivenRoles& given) : lookup_(lookup), given_(given) {}

  bool has(const char* name) const { return text(name).has_value(); }
  std::optional<std::string> text(const char* name) const {
    auto value = lookup_(name);
    if (value && value->empty()) return std::nullopt;
    return value;
  }
  int integer(const char* name, int low) const {
    const auto value = text(name);
    TORCH_CHECK_VALUE(value, "environment variable ", name, " is not set; give --nnodes and --node-rank",
                      kAlone);
    return static_cast<int>(environment::parse_integer(name, *value, low, std::numeric_limits<int>::max()));
  }
  /// The address that the user, or else MASTER_ADDR, says. Empty: neither.
  std::string given_address() const {
    return given_.master_addr.empty() ? text("MASTER_ADDR").value_or("") : given_.master_addr;
  }
  uint16_t given_port() const {
    const auto value = text("MASTER_PORT");
    if (!value) return 0;
    return static_cast<uint16_t>(environment::parse_integer("MASTER_PORT", *value, 0, 65535));
  }

  std::string azure_address() const;
  std::optional<HostRoles> slurm() const;
  std::optional<HostRoles> open_mpi() const;
  std::optional<HostRoles> kubernetes() const;
  std::optional<HostRoles> sage_maker() const;
  bool is_azure_instance() const;
  std::optional<HostRoles> azure_ml() const;

 private:
  /// `variables`: those of the scheduler, beside MASTER_ADDR and MASTER_PORT.
  HostRoles roles(int nnodes, int node_rank, const std::string& own_address, const std::string& scheduler,
                  std::string variables) const {
    const std::string address = given_address();
    if (given_.master_addr.empty() && has("MASTER_ADDR")) variables += ", MASTER_ADDR";
    if (has("MASTER_PORT")) variables += ", MASTER_PORT";
    return {.nnodes = nnodes,
            .node_rank = node_rank,
            .master_addr = address.empty() ? own_address : address,
            .master_port = given_port(),
            .source = scheduler + " (" + variables + ")"};
  }

  const Lookup& lookup_;
  const GivenRoles& given_;
};

/// A step with one task on each of its nodes (srun(1), "OUTPUT ENVIRONMENT VARIABLES"). A batch script is none, and a
/// heterogeneous job's nodes are counted by component.
std::optional<HostRoles> RolesReader::slurm() const {
  if (!has("SLURM_STEP_NUM_NODES") || !has("SLURM_STEP_NUM_TASKS") || has("SLURM_HET_SIZE")) {
    return std::nullopt;
  }
  const int nodes = integer("SLURM_STEP_NUM_NODES", 1);
  if (nodes == 1 || integer("SLURM_STEP_NUM_TASKS", 1) != nodes) return std::nullopt;
  const LaunchEnvironment task = read_launch_environment(lookup_);
  const auto* meeting = std::get_if<TcpMeeting>(&task.meeting);
  if (task.launcher != "srun" || meeting == nullptr) return std::nullopt;
  HostRoles result = roles(nodes, integer("SLURM_NODEID", 0), meeting->host, "Slurm",
                           "SLURM_STEP_NUM_NODES, SLURM_NODEID, SLURM_STEP_NODELIST");
  result.master_port = meeting->port;
  result.job_id = meeting->run_id;
  return result;
}

/// One process on each host (https://docs.open-mpi.org, "Environment variables set for MPI applications"). How many there
/// are elsewhere is not told: a process that has others of its job beside it objects when an address says that hosts
/// are meant.
std::optional<HostRoles> RolesReader::open_mpi() const {
  if (!has("OMPI_COMM_WORLD_SIZE") || !has("OMPI_COMM_WORLD_LOCAL_SIZE")) return std::nullopt;
  const int size = integer("OMPI_COMM_WORLD_SIZE", 1);
  const int here = integer("OMPI_COMM_WORLD_LOCAL_SIZE", 1);
  if (here == size || (here > 1 && given_.master_addr.empty())) return std::nullopt;
  TORCH_CHECK_VALUE(here == 1, "mpirun has started ", here, " of ", size,
                    " processes on this host, and over hosts lockstep run takes one on each: mpirun --map-by "
                    "ppr:1:node",
                    kAlone);
  const std::string of_azure = azure_address();
  TORCH_CHECK_VALUE(!given_address().empty() || !of_azure.empty(),
                    "mpirun has started one process on each of ", size,
                    " hosts and tells no address of the first; give --master-addr HOST", kAlone);
  const std::string variables = "OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK";
  return of_azure.empty() ? roles(size, integer("OMPI_COMM_WORLD_RANK", 0), "", "Open MPI", variables)
                          : roles(size, integer("OMPI_COMM_WORLD_RANK", 0), of_azure, "Azure ML",
                                  variables + ", AZ_BATCH_MASTER_NODE");
}

/// A pod of an indexed job (https://kubernetes.io/docs/concepts/workloads/controllers/job, "Completion mode"). The number
/// of pods is not told, and most such jobs are of pods that have nothing to do with each other: --nnodes says that these have.
std::optional<HostRoles> RolesReader::kubernetes() const {
  if (given_.nnodes.value_or(1) == 1) return std::nullopt;
  TORCH_CHECK_VALUE(!given_address().empty(),
                    "Kubernetes tells a pod its JOB_COMPLETION_INDEX and no address of pod 0; give "
                    "--master-addr JOB-0.SERVICE",
                    kAlone);
  return roles(*given_.nnodes, integer("JOB_COMPLETION_INDEX", 0), "", "Kubernetes", "JOB_COMPLETION_INDEX");
}

/// The address of the first instance in a job of Azure ML with the distribution mpi, empty elsewhere. AZ_BATCH_MASTER_NODE has it
/// with a port of Azure Batch's own, AZ_BATCHAI_MPI_MASTER_NODE alone.
std::string RolesReader::azure_address() const {
  auto node = text("AZ_BATCH_MASTER_NODE");
  if (!node) node = text("AZ_BATCHAI_MPI_MASTER_NODE");
  return node ? node->substr(0, node->find(':')) : std::string();
}

/// One container on each instance (https://github.com/aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md).
std::optional<HostRoles> RolesReader::sage_maker() const {
  const auto list = nlohmann::json::parse(*text("SM_HOSTS"), nullptr, /*allow_exceptions=*/false);
  std::vector<std::string> hosts;
  if (list.is_array()) {
    for (const auto& host : list) hosts.push_back(host.is_string() ? host.get<std::string>() : "");
  }
  const auto place = std::find(hosts.begin(), hosts.end(), *text("SM_CURRENT_HOST"));
  TORCH_CHECK_VALUE(place != hosts.end(), "environment variable SM_HOSTS is ", *text("SM_HOSTS"),
                    ", which has no SM_CURRENT_HOST=", *text("SM_CURRENT_HOST"),
                    "; give --nnodes, --node-rank and --master-addr", kAlone);
  if (hosts.size() == 1) return std::nullopt;
  return roles(static_cast<int>(hosts.size()), static_cast<int>(place - hosts.begin()), hosts.front(),
               "SageMaker", "SM_HOSTS, SM_CURRENT_HOST");
}

/// Azure ML gives its processes RANK and WORLD_SIZE, as launchers do. TORCHELASTIC_RUN_ID shows that one of these came in
/// between.
bool RolesReader::is_azure_instance() const {
  return has("AZUREML_NODE_COUNT") && has("NODE_RANK") && !has("TORCHELASTIC_RUN_ID");
}

/// One process on each instance of a job with the distribution pytorch (learn.microsoft.com, "Distributed GPU training
/// guide").
std::optional<HostRoles> RolesReader::azure_ml() const {
  const int nodes = integer("AZUREML_NODE_COUNT", 1);
  const int processes = has("WORLD_SIZE") ? integer("WORLD_SIZE", 1) : nodes;
  if (nodes == 1 || (processes != nodes && given_.master_addr.empty() && !given_.nnodes)) return std::nullopt;
  TORCH_CHECK_VALUE(
      processes == nodes, "Azure ML has started ", processes, " processes on ", nodes,
      " instances, and over hosts lockstep run takes one on each: process_count_per_instance: 1", kAlone);
  TORCH_CHECK_VALUE(!given_address().empty(), "Azure ML has set no MASTER_ADDR; give --master-addr HOST",
                    kAlone);
  return roles(nodes, integer("NODE_RANK", 0), "", "Azure ML", "AZUREML_NODE_COUNT, NODE_RANK");
}

}  // namespace

std::optional<HostRoles> read_host_roles(const Lookup& lookup, const GivenRoles& given) {
  const RolesReader reader(lookup, given);
  if (given.nnodes == 1) return std::nullopt;
  if (reader.has("RANK") && reader.has("WORLD_SIZE") && !reader.is_azure_instance()) return std::nullopt;
  std::optional<HostRoles> roles;
  if (reader.has("OMPI_COMM_WORLD_RANK")) {
    roles = reader.open_mpi();
  } else if (reader.has("SLURM_STEP_NUM_NODES")) {
    roles = reader.slurm();
  } else if (reader.has("JOB_COMPLETION_INDEX")) {
    roles = reader.kubernetes();
  } else if (reader.has("SM_HOSTS") && reader.has("SM_CURRENT_HOST")) {
    roles = reader.sage_maker();
  } else if (reader.is_azure_instance()) {
    roles = reader.azure_ml();
  }
  // Another number than the scheduler's means other hosts than it tells of.
  if (given.nnodes && roles && roles->nnodes != *given.nnodes) return std::nullopt;
  return roles;
}

}  // namespace lockstep::launch
