#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>

namespace lockstep {

/// Nowhere to meet is known.
struct NoMeeting {
  std::string reason = {};  ///< what is missing and how to give it
};
/// At host:port, where rank 0 listens, or the launcher's agent does.
struct TcpMeeting {
  std::string host = {};
  uint16_t port = 0;
  bool agent_hosts = false;   ///< the launcher's agent serves the store: rank 0 is a client too
  bool port_derived = false;  ///< computed from the Slurm job, not given
  /// Set off this job, and this attempt of it, from others that use the same store.
  std::string run_id = "none";
  int64_t attempt = 0;
};
/// At a file of the job's own; all processes are on this host and were started by one MPI launcher.
struct JobMeeting {
  std::string job = {};  ///< the job's id as the launcher's variables tell it; may be empty
};
/// At a file that the user named.
struct FileMeeting {
  std::string path = {};
};
/// No process to meet: the only one of its world.
struct Alone {};

using Meeting = std::variant<NoMeeting, TcpMeeting, JobMeeting, FileMeeting, Alone>;

/// What the environment says about this process. -1 where it says nothing.
struct LaunchEnvironment {
  std::string launcher = "none";  ///< as World::launcher
  int rank = -1;
  int world_size = -1;
  int local_rank = -1;
  int local_world_size = -1;
  Meeting meeting = {};
};

/// Looks up a variable; nothing when it is unset or empty. environment::text is one.
using Lookup = std::function<std::optional<std::string>(const char* name)>;

/// Reads which launcher started this process and where to meet the others. A pure function of the variables.
///
/// RANK with WORLD_SIZE comes first (lockstep run, torchrun, by hand), then Open MPI's OMPI_COMM_WORLD_*,
/// then Slurm's (SLURM_PROCID inside of a step), then MPICH's PMI_* (Intel MPI and others use them too).
/// MASTER_ADDR and MASTER_PORT are heeded under all of them; where they differ from the address of the
/// launcher's store, because the program set them itself, rank 0 serves a store there. `at_start`: what the
/// variables were before the program set any; empty: the same. MPI launchers tell no
/// address: without MASTER_ADDR their processes meet at a file if they are all on one host. Throws
/// c10::ValueError that names the variable when one is malformed or contradicts another.
LaunchEnvironment read_launch_environment(const Lookup& lookup, const Lookup& at_start = {});

}  // namespace lockstep
