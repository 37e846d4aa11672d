#pragma once

#include <memory>

#include <torch/optim/optimizer.h>

#include <lockstep/nn/collective_optimizer.h>
#include <lockstep/optim/model_averaging.h>

namespace lockstep {

namespace internal {
class OptimizerParts;
}

/// An optimizer that lets a model averager average the parameters after its steps. For post-local SGD
/// (https://arxiv.org/abs/1808.07217), beside DDP with the post-local SGD hook, whose start_localSGD_iter is
/// the averager's warmup_steps. torch/distributed/optim/post_localSGD_optimizer.py.
///
/// param_groups() and their options are those of the local optimizer. Checkpoints have the local optimizer's
/// format and the averager's step besides. Used by one thread at a time.
class PostLocalSGDOptimizer final : public torch::optim::Optimizer, public CollectiveOptimizer {
 public:
  /// Takes the local optimizer over: change options through this one.
  PostLocalSGDOptimizer(std::unique_ptr<torch::optim::Optimizer> optim,
                        std::shared_ptr<ModelAverager> averager);

  /// The local optimizer's step, and averaging where it is time.
  at::Tensor step(LossClosure closure = nullptr) override;
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  void save(torch::serialize::OutputArchive& archive) const override;
  /// Also takes what the local optimizer alone has written; then the averager starts from step 0, with a
  /// warning.
  void load(torch::serialize::InputArchive& archive) override;

  /// The local optimizer; its state() is the state.
  const torch::optim::Optimizer& optim() const { return *optim_; }
  const ModelAverager& averager() const { return *averager_; }
  const ProcessGroup& process_group() const override { return averager_->process_group(); }

 private:
  friend class internal::OptimizerParts;

  std::unique_ptr<torch::optim::Optimizer> optim_;
  std::shared_ptr<ModelAverager> averager_;
};

}  // namespace lockstep
