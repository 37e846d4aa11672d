#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <lockstep/parallel/data_parallel/internal/replica_graphs.h>
#include <lockstep/parallel/data_parallel/internal/replica_state.h>
#include <lockstep/parallel/data_parallel/internal/scatter_gather.h>

namespace lockstep::data_parallel::internal {

/// Where DataParallel's replicas are.
struct ParallelPlan {
  std::vector<at::Device> devices;
  GatherPlace output;

  /// From DataParallel's options; see there.
  static ParallelPlan of(std::vector<at::Device> device_ids, std::optional<at::Device> output_device,
                         int64_t dim, int64_t num_replicas);
};

/// One forward's way through the replicas.
struct ParallelBatch {
  int replicas = 0;                             // 1: the module itself computes
  std::vector<std::vector<at::Tensor>> chunks;  // of each replica
  std::vector<at::Tensor> inputs;               // of the joined graph
  std::vector<ReplicaGraph> graphs;             // of each replica; empty where no gradients are recorded
};

/// DataParallel without the types of its module, arguments and outputs.
class ParallelApply {
 public:
  /// Moves the module to the device if there is only one; otherwise makes the replicas.
  ParallelApply(const std::shared_ptr<torch::nn::Module>& module, ParallelPlan plan,
                ReplicaState::Clone clone);

  /// Splits the arguments' tensors, and brings as many replicas in step as there are chunks; one if the
  /// module is called without arguments.
  ParallelBatch scatter(const std::vector<at::Tensor>& tensors, bool any_arguments);
  /// Calls forward(i, tensors) for each replica i with the tensors to be put into the arguments, on thread i
  /// and device i; in this thread if there is only one.
  void run(ParallelBatch& batch,
           const std::function<void(int replica, const std::vector<at::Tensor>& tensors)>& forward);
  /// The outputs of each replica, as functions of the arguments' tensors and of the module's parameters.
  std::vector<std::vector<at::Tensor>> join(ParallelBatch& batch,
                                            std::vector<std::vector<at::Tensor>> outputs);

  void replicate();
  int64_t replicas_made() const { return state_ ? state_->made() : 0; }
  const ParallelPlan& plan() const { return plan_; }

 private:
  const ParallelPlan plan_;
  ReplicaPlaces places_;
  std::optional<ReplicaState> state_;  // none where the module works alone
};

/// The handle, if there is a module behind it.
template <class Trait>
typename Trait::Handle not_empty(typename Trait::Handle handle) {
  TORCH_CHECK_VALUE(!Trait::is_empty(handle),
                    "DataParallel: there is no module to wrap (it is null or empty)");
  return handle;
}

}  // namespace lockstep::data_parallel::internal
