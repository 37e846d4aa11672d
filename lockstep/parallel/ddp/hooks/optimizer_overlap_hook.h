#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/parallel/ddp/grad_bucket.h>

namespace torch::optim {
class Optimizer;
}

/// The optimizer's step in the backward pass: each parameter takes its step as soon as its gradient is
/// reduced, while backward() computes others. There is no optimizer.step() after backward() then.
///
///     lockstep::OptimizerPerParameter optimizers(model.parameters(), [](auto parameters) {
///       return std::make_shared<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
///     });
///     model.register_comm_hook(nullptr, lockstep::hook_then_optimizer(lockstep::allreduce_hook,
///                                                                     lockstep::OptimizerHookState(optimizers)));
///
/// What needs all gradients before the first step (clipping by the global norm, GradScaler's skipping) and
/// several backwards for one step (gradient accumulation without no_sync()) don't go with it.
/// torch/distributed/algorithms/ddp_comm_hooks/optimizer_overlap_hooks.py.
namespace lockstep {

/// Takes a step with one parameter: torch's functional optimizers' step_param(). Called without recording for
/// autograd, on communication threads, for several parameters at once.
using ParameterStep = std::function<void(const at::Tensor& parameter, const at::Tensor& gradient)>;

/// A LibTorch optimizer of its own for each parameter, as a ParameterStep. (They step over all parameters
/// that they have.) A handle: copies share the optimizers.
class OptimizerPerParameter {
 public:
  /// Makes the optimizer of these parameters; is given one.
  using Factory = std::function<std::shared_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> parameters)>;

  OptimizerPerParameter(const std::vector<at::Tensor>& parameters, const Factory& make);

  /// Throws c10::ValueError for a parameter that it was not made with.
  void operator()(const at::Tensor& parameter, const at::Tensor& gradient) const;

  /// In the parameters' order: for learning rates (param_groups(), not during backward) and for saving.
  const std::vector<std::shared_ptr<torch::optim::Optimizer>>& optimizers() const;

 private:
  struct Data;
  std::shared_ptr<const Data> data_;
};

/// Which step hook_then_optimizer() takes, and for which parameters.
class OptimizerHookState {
 public:
  /// `params`: all if not given.
  explicit OptimizerHookState(ParameterStep functional_optimizer,
                              const std::optional<std::vector<at::Tensor>>& params = {});

  const ParameterStep& functional_optimizer() const { return functional_optimizer_; }
  bool optimizes(const at::Tensor& parameter) const;

 private:
  ParameterStep functional_optimizer_;
  std::optional<std::unordered_set<const c10::TensorImpl*>> params_to_optimize_;
  std::vector<at::Tensor> held_;  // so that no other tensor gets one's address
};

namespace hooks {
HookFuture then_optimizer(const HookFuture& reduced, GradBucket& bucket,
                          const std::shared_ptr<const OptimizerHookState>& state);
}

/// A hook that runs `hook`, any hook of the form (state, bucket), and then the step of each parameter in the
/// bucket.
template <class Hook>
auto hook_then_optimizer(Hook hook, OptimizerHookState optimizer_state) {
  auto shared = std::make_shared<const OptimizerHookState>(std::move(optimizer_state));
  return [hook = std::move(hook), shared](const auto& state, GradBucket& bucket) -> HookFuture {
    return hooks::then_optimizer(hook(state, bucket), bucket, shared);
  };
}

}  // namespace lockstep
