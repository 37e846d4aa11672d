#include <limits>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/rendezvous/internal/hostlist.h>
#include <lockstep/rendezvous/launch_environment.h>
#include <lockstep/rendezvous/network/port_range.h>

namespace lockstep {
namespace {

using rendezvous_internal::expand_hostlist;
using rendezvous_internal::expand_tasks_per_node;

/// The variables in which one launcher tells a process's place.
struct Names {
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
};
constexpr Names kTorch{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpi{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                         "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names kMpich{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
constexpr Names kCray{"PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"};

constexpr int64_t kMostRanks = std::numeric_limits<int>::max();

class Reader {
 public:
  Reader(const Lookup& lookup, const Lookup& at_start) : lookup_(lookup), at_start_(at_start) {}

  std::optional<std::string> text(const char* name) const {
    auto value = lookup_(name);
    if (value && value->empty()) return std::nullopt;
    return value;
  }
  bool has(const char* name) const { return text(name).has_value(); }
  /// As text(), before the program has set it itself.
  std::optional<std::string> launchers(const char* name) const {
    return at_start_ ? at_start_(name) : text(name);
  }

  std::optional<int64_t> integer(const char* name, int64_t low, int64_t high) const {
    auto value = text(name);
    if (!value) return std::nullopt;
    return environment::parse_integer(name, *value, low, high);
  }

  /// A number of ranks that its launcher always sets together with `because`.
  int64_t needed(const char* name, const char* because) const {
    auto value = integer(name, 1, kMostRanks);
    TORCH_CHECK_VALUE(value, "environment variable ", because, " is set, but ", name,
                      " is not; set both or neither");
    return *value;
  }

 private:
  const Lookup& lookup_;
  const Lookup& at_start_;
};

void read_place(const Reader& reader, const Names& names, LaunchEnvironment& environment) {
  auto read = [&](const char* name, int64_t low) {
    return static_cast<int>(reader.integer(name, low, kMostRanks).value_or(-1));
  };
  environment.rank = read(names.rank, 0);
  environment.world_size = read(names.world_size, 1);
  environment.local_rank = read(names.local_rank, 0);
  environment.local_world_size = read(names.local_world_size, 1);
}

void check_place(const Names& names, const LaunchEnvironment& e) {
  bool rank_fits = e.rank < 0 || e.world_size < 0 || e.rank < e.world_size;
  TORCH_CHECK_VALUE(rank_fits, "environment variable ", names.rank, " is ", e.rank, ", which is not below ",
                    names.world_size, "=", e.world_size, "; ranks count from 0");
  bool local_rank_fits = e.local_rank < 0 || e.local_world_size < 0 || e.local_rank < e.local_world_size;
  TORCH_CHECK_VALUE(local_rank_fits, "environment variable ", names.local_rank, " is ", e.local_rank,
                    ", which is not below ", names.local_world_size, "=", e.local_world_size,
                    "; local ranks count from 0 on each host");
  bool size_fits = e.local_world_size < 0 || e.world_size < 0 || e.local_world_size <= e.world_size;
  TORCH_CHECK_VALUE(size_fits, "environment variable ", names.local_world_size, " is ", e.local_world_size,
                    ", which is more than ", names.world_size, "=", e.world_size);
}

/// RANK or WORLD_SIZE alone, left in the environment of another launcher, must not tell something else.
void check_leftovers(const Reader& reader, const Names& names, const LaunchEnvironment& e) {
  auto rank = reader.integer(kTorch.rank, 0, kMostRanks);
  TORCH_CHECK_VALUE(!rank || *rank == e.rank, "environment variable RANK is ", rank.value_or(-1), ", but ",
                    e.launcher, " says ", names.rank, "=", e.rank, "; unset RANK, or set WORLD_SIZE too");
  auto size = reader.integer(kTorch.world_size, 1, kMostRanks);
  TORCH_CHECK_VALUE(!size || *size == e.world_size, "environment variable WORLD_SIZE is ", size.value_or(-1),
                    ", but ", e.launcher, " says ", names.world_size, "=", e.world_size,
                    "; unset WORLD_SIZE, or set RANK too");
}

/// Whether a program that sets this host means the agent at 127.0.0.1. Other names may, too, but only their
/// addresses would tell.
bool names_loopback(const std::string& host) {
  return host == "localhost" || host == "0.0.0.0" || host == "127.0.0.1" || host == "::1";
}

/// Where torchrun's agent serves a store is at first in the variables that the program may have set since.
void look_for_torchruns_agent(const Reader& reader, TcpMeeting& meeting) {
  const auto host = reader.launchers("MASTER_ADDR");
  const auto port = reader.launchers("MASTER_PORT");
  meeting.agent_hosts = !host || !port || *port == std::to_string(meeting.port);
  if (meeting.agent_hosts && host && port) meeting.host = *host;
}

/// Sets agent_hosts where the launcher's agent serves the store at the meeting's address, as rendezvous.py's
/// _torchelastic_use_agent_store; otherwise rank 0 does. Programs set MASTER_ADDR and MASTER_PORT themselves,
/// and nothing listens there then: LOCKSTEP_AGENT_STORE, "HOST:PORT/RUN_ID", says where our launchers' agent
/// does. With another run's id it is left over from a launcher that started the present one. A program that
/// sets LOCKSTEP_AGENT_PORT, where the agents of several hosts meet, means them.
void look_for_agent(const Reader& reader, TcpMeeting& meeting) {
  if (reader.text("TORCHELASTIC_USE_AGENT_STORE") != "True") return;
  const auto store = reader.text("LOCKSTEP_AGENT_STORE");
  if (!store || !store->ends_with("/" + meeting.run_id)) return look_for_torchruns_agent(reader, meeting);
  if (reader.text("LOCKSTEP_AGENT_PORT") == std::to_string(meeting.port)) {
    const std::string address = store->substr(0, store->size() - meeting.run_id.size() - 1);
    const size_t colon = address.rfind(':');
    const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
    meeting.port = static_cast<uint16_t>(environment::parse_integer("LOCKSTEP_AGENT_STORE", port, 0, 65535));
    meeting.host = address.substr(0, colon);
    meeting.agent_hosts = true;
    return;
  }
  const std::string place = ":" + std::to_string(meeting.port) + "/" + meeting.run_id;
  if (!store->ends_with(place)) return;
  const std::string host = store->substr(0, store->size() - place.size());
  meeting.agent_hosts = meeting.host == host || (names_loopback(meeting.host) && names_loopback(host));
  if (meeting.agent_hosts) meeting.host = host;  // the agent does not listen at ::1
}

/// MASTER_ADDR and MASTER_PORT, where set; the store behind them is the agent's or rank 0's.
Meeting given_address(const Reader& reader) {
  auto host = reader.text("MASTER_ADDR");
  auto port = reader.integer("MASTER_PORT", 0, 65535);
  if (!host || !port) {
    const char* missing =
        !host ? (!port ? "MASTER_ADDR and MASTER_PORT are" : "MASTER_ADDR is") : "MASTER_PORT is";
    return NoMeeting{
        std::string("environment variable ") + missing +
        " not set. Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, the same "
        "for all processes"};
  }
  TcpMeeting meeting{.host = *host, .port = static_cast<uint16_t>(*port)};
  // The agent keeps one store through restarts of its workers, so each attempt needs keys of its own.
  meeting.run_id = reader.text("TORCHELASTIC_RUN_ID").value_or("none");
  meeting.attempt =
      reader.integer("TORCHELASTIC_RESTART_COUNT", 0, std::numeric_limits<int64_t>::max()).value_or(0);
  look_for_agent(reader, meeting);
  return meeting;
}

void read_torch(const Reader& reader, LaunchEnvironment& environment) {
  read_place(reader, kTorch, environment);
  check_place(kTorch, environment);
  environment.meeting = given_address(reader);
  if (reader.text("LOCKSTEP_RUN") == "1") {
    environment.launcher = "lockstep run";
  } else if (reader.has("TORCHELASTIC_RUN_ID")) {
    environment.launcher = "torchrun";
  } else if (environment.rank >= 0 || environment.world_size >= 0) {
    environment.launcher = "environment";
  }
}

Meeting mpi_meeting(const Reader& reader, const LaunchEnvironment& environment) {
  if (reader.has("MASTER_ADDR") || reader.has("MASTER_PORT")) return given_address(reader);
  if (environment.local_world_size < environment.world_size) {
    std::string here =
        environment.local_world_size < 0
            ? "does not tell whether they are on one host"
            : "put only " + std::to_string(environment.local_world_size) + " of them on this host";
    return NoMeeting{
        environment.launcher + " started " + std::to_string(environment.world_size) + " processes and " +
        here +
        "; an MPI launcher tells no address, so set MASTER_ADDR to the host of rank 0 and MASTER_PORT to "
        "a free port there (Open MPI: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT; MPICH: -genv)"};
  }
  JobMeeting meeting;
  // The same for all processes of a job, and together hardly ever the same for two.
  for (const char* name : {"PMIX_NAMESPACE", "PMIX_SERVER_URI2", "OMPI_MCA_orte_precondition_transports",
                           "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PMI_KVSNAME"}) {
    if (auto value = reader.text(name)) meeting.job += std::string(name) + "=" + *value + ";";
  }
  return meeting;
}

void read_mpi(const Reader& reader, const Names& names, const char* launcher,
              LaunchEnvironment& environment) {
  environment.launcher = launcher;
  reader.needed(names.world_size, names.rank);
  read_place(reader, names, environment);
  check_place(names, environment);
  check_leftovers(reader, names, environment);
  environment.meeting = mpi_meeting(reader, environment);
}

/// In LOCKSTEP_PORT_RANGE, or below Linux's ephemeral ports; different for the steps of a job and for jobs
/// with neighbouring numbers.
uint16_t slurm_port(const Reader& reader, int64_t job, int64_t step) {
  const auto text = reader.text("LOCKSTEP_PORT_RANGE");
  const auto range = text ? PortRange::parse(*text) : PortRange{.first = 15000, .last = 29999};
  return static_cast<uint16_t>(range.first + (job % 15000 * 31 + step % 15000) % range.count());
}

Meeting slurm_meeting(const Reader& reader) {
  if (reader.has("MASTER_ADDR") && reader.has("MASTER_PORT")) return given_address(reader);
  TcpMeeting meeting;
  if (auto host = reader.text("MASTER_ADDR")) {
    meeting.host = *host;
  } else {
    auto list = reader.text("SLURM_STEP_NODELIST");
    if (!list) list = reader.text("SLURM_JOB_NODELIST");
    if (!list) list = reader.text("SLURM_NODELIST");
    if (!list) return NoMeeting{"srun set no SLURM_STEP_NODELIST; set MASTER_ADDR to the host of rank 0"};
    auto hosts = expand_hostlist(*list);
    meeting.host =
        hosts.size() == 1 ? "127.0.0.1" : hosts.front();  // one host: no process outside needs to reach it
  }
  if (auto port = reader.integer("MASTER_PORT", 0, 65535)) {
    meeting.port = static_cast<uint16_t>(*port);
    return meeting;
  }
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  auto job = reader.integer("SLURM_JOB_ID", 0, kMost);
  if (!job) job = reader.integer("SLURM_JOBID", 0, kMost);
  if (!job)
    return NoMeeting{"srun set no SLURM_JOB_ID to derive a port from; set MASTER_PORT to a free port"};
  auto step = reader.integer("SLURM_STEP_ID", 0, kMost);
  if (!step) step = reader.integer("SLURM_STEPID", 0, kMost);
  meeting.port = slurm_port(reader, *job, step.value_or(0));
  meeting.port_derived = true;
  meeting.run_id = "slurm-" + std::to_string(*job) + "." + std::to_string(step.value_or(0));
  return meeting;
}

void read_slurm(const Reader& reader, LaunchEnvironment& environment) {
  environment.launcher = "srun";
  // SLURM_NTASKS may be the whole allocation's; the step's own number is right where there is one.
  bool step_size = reader.has("SLURM_STEP_NUM_TASKS");
  Names names{"SLURM_PROCID", step_size ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", "SLURM_LOCALID",
              "SLURM_STEP_TASKS_PER_NODE"};
  environment.world_size = static_cast<int>(reader.needed(names.world_size, names.rank));
  environment.rank = static_cast<int>(*reader.integer(names.rank, 0, kMostRanks));
  environment.local_rank = static_cast<int>(reader.integer(names.local_rank, 0, kMostRanks).value_or(-1));
  auto node = reader.integer("SLURM_NODEID", 0, kMostRanks);
  auto tasks = reader.text(names.local_world_size);
  if (node && tasks) {
    auto counts = expand_tasks_per_node(*tasks);
    TORCH_CHECK_VALUE(static_cast<size_t>(*node) < counts.size(), "environment variable SLURM_NODEID is ",
                      *node, ", but SLURM_STEP_TASKS_PER_NODE=", *tasks, " has ", counts.size(), " nodes");
    environment.local_world_size = counts[static_cast<size_t>(*node)];
  }
  check_place(names, environment);
  check_leftovers(reader, names, environment);
  environment.meeting = slurm_meeting(reader);
}

}  // namespace

LaunchEnvironment read_launch_environment(const Lookup& lookup, const Lookup& at_start) {
  Reader reader(lookup, at_start);
  LaunchEnvironment environment;
  // Both variables: a launcher placed this very process, perhaps torchrun, itself started by mpirun or srun.
  bool placed = reader.has("RANK") && reader.has("WORLD_SIZE");
  // A batch script is not a step: there SLURM_PROCID is 0 and means nothing. Hydra, started inside of a step,
  // sets MPI_LOCALNRANKS; its processes inherit the Slurm variables of their proxy.
  bool slurm_step =
      reader.has("SLURM_PROCID") && !reader.has(kMpich.local_world_size) &&
      (reader.has("SLURM_STEP_ID") || reader.has("SLURM_STEPID") || reader.has("SLURM_STEP_NODELIST"));
  if (placed) {
    read_torch(reader, environment);
  } else if (reader.has(kOpenMpi.rank)) {
    read_mpi(reader, kOpenMpi, "mpirun", environment);
  } else if (slurm_step) {
    read_slurm(reader, environment);
  } else if (reader.has(kMpich.rank)) {
    read_mpi(reader, reader.has(kCray.local_world_size) ? kCray : kMpich, "mpich", environment);
  } else {
    read_torch(reader, environment);
  }
  return environment;
}

}  // namespace lockstep
