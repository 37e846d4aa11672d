#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/parallel/data_parallel/internal/replica_graphs.h>

namespace lockstep::data_parallel::internal {

/// The replicas of a module, their tensors and modes in step with the module's. Replicas have parameters of
/// their own, leaves for their own graphs, which on the module's device share its parameters' memory: nothing
/// is copied there, and what changes a parameter in place changes all. The first replica's buffers share the
/// module's memory too; the others' are copies, made new for each forward, so the first replica's updates are
/// the ones that last. torch/nn/parallel/replicate.py, but that the replicas stay.
class ReplicaState {
 public:
  /// Makes the replica of this number anew, and returns it with all tensors on the device.
  using Clone = std::function<std::shared_ptr<torch::nn::Module>(int replica, at::Device device)>;

  ReplicaState(std::shared_ptr<torch::nn::Module> module, std::vector<at::Device> devices, Clone clone);

  /// Makes all replicas anew; their random initial values, which are never seen, don't touch the default
  /// generator. Throws for modules that can't be cloned, naming the part.
  void replicate();
  /// Brings the first `count` replicas in step with the module: tensors (to() and load() included), whether
  /// they require gradients, and training or evaluation mode. Makes all anew if the module has other
  /// submodules or other tensors than before.
  void bring_in_step(int count);
  /// How many replicas were made so far.
  int64_t made() const { return made_; }

  /// The module's tensors that require gradients, each once.
  std::vector<at::Tensor> sources() const;
  /// Appends the replica's leaves, whose sources begin at `first` in the graph's inputs. Call after
  /// bring_in_step().
  void append_leaves(int replica, size_t first, ReplicaGraph& graph) const;

 private:
  /// A module tree, flat; the order is that of definition, so equal places correspond.
  struct Parts {
    std::vector<std::shared_ptr<torch::nn::Module>> modules;
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> buffers;
  };
  static Parts parts_of(const torch::nn::Module& module);
  void check_is_copy(const Parts& copy) const;
  bool is_changed(const Parts& now) const;

  const std::shared_ptr<torch::nn::Module> module_;
  const std::vector<at::Device> devices_;
  const Clone clone_;
  Parts original_;  // as they were at the last bring_in_step()
  std::vector<Parts> replicas_;
  int64_t made_ = 0;
};

}  // namespace lockstep::data_parallel::internal
