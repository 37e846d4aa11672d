#pragma once

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/nn/collective_optimizer.h>
#include <lockstep/nn/join.h>
#include <lockstep/optim/partition.h>

namespace lockstep {

namespace internal {
class OptimizerParts;
class ParameterBroadcast;
}  // namespace internal

/// Makes an optimizer over these parameter groups, as its constructor takes them: options may be missing, and
/// a group may be without parameters.
using OptimizerFactory =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::optim::OptimizerParamGroup>)>;

/// The factory of a LibTorch optimizer: optimizer_class<torch::optim::Adam>(torch::optim::AdamOptions(1e-3)).
template <class LocalOptimizer, class... Defaults>
OptimizerFactory optimizer_class(Defaults... defaults) {
  return [defaults...](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return std::make_unique<LocalOptimizer>(std::move(groups), defaults...);
  };
}

struct ZeroRedundancyOptions {
  ProcessGroup process_group = {};  ///< empty: the default group
  /// Parameters are moved into flat tensors, one for each rank's share, in shared memory: a step sends them
  /// without copies. They keep their sizes and strides, and must be on one device.
  bool parameters_as_bucket_view = false;
  /// Steps are made by the communication hooks of parallel/ddp/hooks/zero_hook.h, bucket by bucket, and step() does nothing.
  bool overlap_with_ddp = false;
};

/// An optimizer whose state is shared out: each rank keeps that of about 1/N of the parameters, updates
/// these, and broadcasts them to the others. Where Adam needs 8 bytes beside each float of a model, a rank of
/// four needs 2. ZeRO stage 1 (https://arxiv.org/abs/1910.02054);
/// torch/distributed/optim/zero_redundancy_optimizer.py.
///
///     lockstep::ZeroRedundancyOptimizer optimizer(
///         model.parameters(),
///         lockstep::optimizer_class<torch::optim::Adam>(torch::optim::AdamOptions(1e-3)));
///     … loss.backward(); optimizer.step();
///
/// Any LibTorch optimizer that updates each parameter by itself gives the same numbers as without sharing
/// (LBFGS does not, nor what looks at the norm of all gradients within its step). It is a
/// torch::optim::Optimizer: zero_grad(), param_groups() and their options concern all parameters, so that
/// learning-rate schedulers and clipping work as ever; state() is empty, see optim().
///
/// Checkpoints: consolidate_state_dict(to) on all ranks, then torch::save(optimizer, …) on that one, writes
/// what the plain optimizer would have written. torch::load(optimizer, …) on all ranks takes such a file, of
/// any number of ranks, or of the plain optimizer. By names, and in Python's form: optimizer_state_dict.h.
///
/// All members of the group have the same parameters, with the same values (DistributedDataParallel sees to
/// that), and call the same methods in the same order. Used by one thread at a time. Holds the parameters.
/// step() throws what broadcasts throw; some parameters may have their new values then, and others not.
class ZeroRedundancyOptimizer : public torch::optim::Optimizer, public Joinable, public CollectiveOptimizer {
 public:
  /// Throws c10::ValueError for no parameters, for parameters that are undefined, no leaves, sparse, in two
  /// groups, or of several types, with parameters_as_bucket_view on several devices, and on ranks that are no
  /// member of the group.
  ZeroRedundancyOptimizer(std::vector<at::Tensor> params, OptimizerFactory optimizer_class,
                          const ZeroRedundancyOptions& options = {});
  ZeroRedundancyOptimizer(std::vector<torch::optim::OptimizerParamGroup> params,
                          OptimizerFactory optimizer_class, const ZeroRedundancyOptions& options = {});
  ZeroRedundancyOptimizer(ZeroRedundancyOptimizer&&) = delete;
  ~ZeroRedundancyOptimizer() override;

  /// Updates this rank's parameters and exchanges all. Every rank calls the closure, if there is one, and
  /// gets its own loss.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// One more group; its parameters are shared out, the others stay where they are. Hides Optimizer's, which
  /// must not be called through a reference to the base: the next step() would say so.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// Brings the state of all ranks to group rank `to`, for save(). Collective. Where parameters are on
  /// several devices, an optimizer that is not LibTorch's needs an OptimizerFormat (optimizer_format.h).
  void consolidate_state_dict(int to = 0);
  /// Python's state_dict(): the whole state, as of the last consolidate_state_dict(), and the options of now,
  /// in the local optimizer's own format. Throws c10::Error without a consolidation to this rank.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Python's load_state_dict(): takes this rank's part of a whole state, and all options. Every rank calls
  /// it.
  void load(torch::serialize::InputArchive& archive) override;

  /// The optimizer of this rank's parameters; its state() is all the state that there is here.
  const torch::optim::Optimizer& optim() const { return *local_; }
  /// The group rank that updates each parameter, by group and index.
  const Partition& partition() const { return partition_; }
  const ProcessGroup& process_group() const override { return options_.process_group; }
  bool overlap_with_ddp() const { return options_.overlap_with_ddp; }

  /// A rank that has joined goes on to update its parameters, with the gradients that it finds in them: let
  /// the model's joinable come first. Throws c10::Error with overlap_with_ddp.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  at::Device join_device() const override;
  ProcessGroup join_process_group() const override { return options_.process_group; }

  /// For the hooks of parallel/ddp/hooks/zero_hook.h, with overlap_with_ddp: updates those of `parameters` that are this rank's
  /// by `gradients` (theirs own, in .grad(), are not used), and starts to send every one from its owner.
  /// Collective: the same parameters in the same order on all ranks. Parameters that this optimizer does not
  /// have are left out.
  void start_step(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients);
  /// Returns when everything that start_step() has started is there.
  void finish_step();

 private:
  friend class internal::OptimizerParts;

  std::vector<torch::optim::OptimizerParamGroup> groups_of_rank(int rank) const;
  const at::Tensor& local_parameter(const at::Tensor& parameter) const;
  at::Tensor local_step(const LossClosure& closure);
  void check_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups) const;
  void check_groups_are_known() const;
  void assign();
  void build_buckets();
  void follow_trainability();
  void exchange();

  OptimizerFactory factory_;
  ZeroRedundancyOptions options_;
  int rank_ = 0;
  Partition partition_;
  std::unordered_map<const c10::TensorImpl*, int> owners_;
  // With overlap_with_ddp the local optimizer steps aliases of the parameters, which share their memory but
  // have gradients of their own: autograd may be at work on the parameters' meanwhile.
  std::unordered_map<const c10::TensorImpl*, at::Tensor> aliases_;
  std::unique_ptr<torch::optim::Optimizer> local_;
  std::unique_ptr<torch::optim::Optimizer> consolidated_;  // of all parameters, where state was brought to
  std::vector<bool> trainable_;
  std::vector<at::Tensor> buckets_;  // by rank; not defined for one without parameters
  std::unique_ptr<internal::ParameterBroadcast> broadcast_;
};

}  // namespace lockstep
