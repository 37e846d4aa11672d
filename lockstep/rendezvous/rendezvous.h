#pragma once

#include <chrono>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include <lockstep/rendezvous/world.h>

namespace lockstep {

/// How the processes of a job find each other. Everything may be left out when a launcher started the
/// program.
struct RendezvousOptions {
  /// "" or "env://"    as the environment says: lockstep run, torchrun, mpirun (Open MPI, MPICH), srun, or
  ///                   by hand RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (and LOCAL_RANK, LOCAL_WORLD_SIZE)
  /// "tcp://HOST:PORT" rank 0 listens there; rank and world size from below or from ?rank=R&world_size=N
  /// "file:///PATH"    a file that every process can reach (NFS will do) and that does not exist yet
  std::string init_method = {};  // {}: without it, compilers warn about {.rank = 0, .world_size = 1}
  /// A store that the caller made, instead of an init_method; then rank and world_size are needed too.
  c10::intrusive_ptr<c10d::Store> store = {};
  int rank = -1;        ///< -1: from init_method or environment
  int world_size = -1;  ///< -1: from init_method or environment
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// Meets all other processes of the job, and returns when all of them are there. Semantics of
/// torch.distributed.init_process_group's rendezvous (torch/distributed/rendezvous.py), which it can be mixed
/// with. {.rank = 0, .world_size = 1} needs no environment and opens no socket.
///
/// Where rank 0 hosts the store, it listens on loopback only when the address is a loopback one, on the
/// address itself when that is one of this host's, and on that of interface_between_hosts() otherwise.
///
/// May be called again in one process (initialise, destroy, initialise again): every call meets in a key
/// space of its own, so all ranks must call equally often. Stores of env://, tcp:// and file:// live until
/// the process ends. Thread-safe. Ranks may be threads of one process.
///
/// Throws c10::ValueError for a missing, malformed or contradictory option or variable; c10::DistNetworkError
/// when the port is in use or no process listens there; c10::DistTimeoutError that names the ranks that did
/// not come within `timeout`; c10::DistStoreError when two processes have the same rank; c10::DistBackendError in a process
/// that is left over from an earlier generation of its job (objection_to_old_generation).
World rendezvous(const RendezvousOptions& options = {});

}  // namespace lockstep
