#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <lockstep/rendezvous/launch_environment.h>

namespace lockstep::launch {

/// Which host of a job over several this is, and where its host 0 is.
struct HostRoles {
  int nnodes = 0;
  int node_rank = 0;
  std::string master_addr = {};
  uint16_t master_port = 0;  // 0: the usual one
  std::string job_id = {};   // sets this job off from others on these hosts; empty: none is known
  std::string source = {};   // the scheduler, and the variables that say it
};

/// What the user has said. Empty: nothing.
struct GivenRoles {
  std::optional<int> nnodes = {};
  std::string master_addr = {};
};

/// Reads from a scheduler's variables which host this is: of a Slurm step, mpirun of Open MPI, an indexed job of Kubernetes,
/// SageMaker and Azure ML. A pure function of the variables.
///
/// Nothing where they do not say for certain that one launcher was started on each host and that there are several hosts,
/// and in a process that a launcher has given its rank (RANK, WORLD_SIZE; but Azure ML's for an instance). MASTER_ADDR
/// and MASTER_PORT go before the address that the scheduler tells. Throws c10::ValueError with the remedy when there are
/// several hosts, and what a job over them needs is missing.
std::optional<HostRoles> read_host_roles(const Lookup& lookup, const GivenRoles& given);

}  // namespace lockstep::launch
