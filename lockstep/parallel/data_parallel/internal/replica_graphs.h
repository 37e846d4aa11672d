#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/base/process/thread_team.h>

namespace lockstep::data_parallel::internal {

/// The autograd graph that one replica's forward built, cut off from the rest: it begins at leaves of its
/// own.
struct ReplicaGraph {
  std::vector<at::Tensor> leaves;  // distinct; all require gradients
  std::vector<size_t> sources;     // of each leaf: the input that it stands for
  std::vector<at::Tensor> outputs;
};

/// Where the graphs were built, and where their backward runs.
struct ReplicaPlaces {
  std::shared_ptr<ThreadTeam> threads;
  std::vector<at::Device> devices;

  /// "in replica 1 on device cpu"
  std::string name(int replica) const;
};

/// Puts the replicas' graphs into the caller's graph as one node: returns, for each replica, its outputs as
/// functions of `inputs`. In backward each replica's graph runs on its own thread (on accelerators, on their
/// devices' autograd threads), and an input's gradient is the sum over its leaves in the order of replicas.
/// Gradients of gradients work as ever. Outputs that need no gradient come back as they are.
std::vector<std::vector<at::Tensor>> join_graphs(std::vector<ReplicaGraph> replicas,
                                                 const std::vector<at::Tensor>& inputs,
                                                 const ReplicaPlaces& places);

}  // namespace lockstep::data_parallel::internal
