#pragma once

#include <concepts>
#include <memory>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <lockstep/parallel/fsdp/fsdp_core.h>

namespace lockstep {

/// Optimizers that update each element by itself, so that each rank can update its own rows. LBFGS looks at all.
template <class T>
concept ElementwiseOptimizer = std::same_as<T, torch::optim::SGD> || std::same_as<T, torch::optim::Adam> ||
    std::same_as<T, torch::optim::AdamW> || std::same_as<T, torch::optim::RMSprop> ||
    std::same_as<T, torch::optim::Adagrad>;

/// The optimizer of a FullyShardedDataParallel's shards, which makes it (make_optimizer()): LibTorch's own, but step() is
/// collective, for it writes what all ranks read. Schedulers and GradScaler take it as any other; its state comes
/// from the model (full_optim_state_dict(), sharded_optim_state_dict()). Used by one thread at a time.
template <ElementwiseOptimizer Base>
class ShardedOptimizer final : public Base, public fsdp::OptimizerOfRows {
 public:
  template <class Parameters, class Defaults>
  ShardedOptimizer(std::shared_ptr<FsdpCore> core, Parameters parameters, Defaults defaults)
      : Base(std::move(parameters), std::move(defaults)), core_(std::move(core)) {}

  /// Updates this rank's rows; when it returns, all ranks have updated theirs. Every rank calls it, also one without
  /// gradients. A closure runs before. Throws c10::Error while a forward or backward of this process is under way, and what
  /// operations of the group throw.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const c10::AutoGradMode with_gradients(true);
      loss = closure();
    }
    core_->step(*this, [this] { Base::step(nullptr); });
    return loss;
  }
  /// Also what has added up under no_sync(). Through torch::optim::Optimizer, whose zero_grad() is not virtual, that stays.
  void zero_grad(bool set_to_none = true) {
    Base::zero_grad(set_to_none);
    core_->drop_sums(*this);
  }
  const ProcessGroup& process_group() const override { return core_->process_group(); }

 private:
  std::shared_ptr<FsdpCore> core_;
};

}  // namespace lockstep
