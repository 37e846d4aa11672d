#pragma once

#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/rendezvous/topology.h>

namespace lockstep {

/// What rendezvous() found out: which rank this process is, how many there are, and the store through which
/// they talk. A value; the store may be used from several threads.
struct World {
  int rank = 0;
  int world_size = 1;
  /// As the launcher numbers this job's processes on this host, by which programs choose devices. Where it
  /// says nothing, as the topology does.
  int local_rank = 0;
  int local_world_size = 1;
  Topology topology = {};         ///< which ranks share memory; the launcher's numbers may be others
  std::string meeting_host = {};  ///< the store's host, as this process was told; "" where it has none
  c10::intrusive_ptr<c10d::Store> store = {};  ///< this world's own key space; no other keys are in it
  std::string met_at =
      {};  ///< the all-gather (store_all_gather.h) in that store to which all ranks have come
  std::string launcher =
      "none";  ///< "lockstep run", "torchrun", "mpirun", "mpich", "srun", "environment" or "none"
};

}  // namespace lockstep
