#pragma once

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/tensor_tree.h>

namespace lockstep {

struct ActivationCheckpointOptions {
  /// Whether the function draws the same random numbers again, on the CPU and on devices: dropout needs it.
  bool preserve_rng_state = true;
  /// Whether shapes, dtypes and devices of what is computed again are compared with those of the first time.
  bool determinism_check = true;
  /// Whether the function ends, by an exception inside of it, as soon as all that backward needs is computed again.
  bool early_stop = true;
};

namespace internal {

class ActivationFrame;

/// While it lives, what this thread's operations save for backward is dropped instead, and computed again when backward
/// asks for it, by `recompute` with the `inputs`.
class ActivationScope {
 public:
  using Recompute = std::function<void(const std::vector<at::Tensor>& inputs)>;

  ActivationScope(const ActivationCheckpointOptions& options, const std::vector<at::Tensor>& inputs,
                  Recompute recompute);
  ActivationScope(const ActivationScope&) = delete;
  ActivationScope& operator=(const ActivationScope&) = delete;
  ~ActivationScope();
  /// The function has returned.
  void complete();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Stands in a kept argument where a tensor was.
at::Tensor placeholder();

/// Takes the tensors out of an argument of which others can take the place; others stay in it.
template <class Argument>
void take_tensors(Argument& argument, std::vector<at::Tensor>& tensors) {
  if constexpr (can_replace_tensors<Argument>) {
    for_each_owned_tensor(argument, [&](at::Tensor& tensor) {
      tensors.push_back(std::move(tensor));
      tensor = placeholder();
    });
  }
}

template <class Argument>
void put_tensors(Argument& argument, std::vector<at::Tensor>::const_iterator& next) {
  if constexpr (can_replace_tensors<Argument>) {
    for_each_owned_tensor(argument, [&](at::Tensor& tensor) { tensor = *next++; });
  }
}

}  // namespace internal

/// Activation checkpointing: runs function(arguments…), but keeps for backward only the arguments. What its operations save
/// is dropped, and when backward comes to them the function runs again: less memory for the time of a second forward.
///
///     for (auto& block : blocks) x = lockstep::activation_checkpoint({}, block, x);
///
/// (Not called `checkpoint`, as in Python, for here that word is for what lies on the disk.) It is the form with
/// use_reentrant=False: the graph is the usual one, so DistributedDataParallel's hooks, torch::autograd::grad(), double
/// backward, retain_graph, frozen inputs and checkpoints within checkpoints work. The function runs again in the thread of
/// backward, with the random numbers and autocast of the first time and gradients enabled. It must do the same then, and
/// must not mind that it may be ended early. With gradients disabled it just runs.
///
/// `function`: a lambda, a holder such as torch::nn::Linear; it is copied. Arguments are copied, too; tensors in them
/// (tensor_tree.h) are kept as autograd keeps saved ones. Throws in backward c10::Error when an argument was changed in
/// place since, when a parameter that was saved was (where Python would use the new one), and when the function has saved
/// something else this time; and, at the first call, in a process whose autograd engine is not torch's own. Thread-safe.
/// torch/utils/checkpoint.py, _checkpoint_without_reentrant_generator.
template <class Function, class... Arguments>
auto activation_checkpoint(const ActivationCheckpointOptions& options, Function&& function,
                           Arguments&&... arguments) {
  using Held = std::decay_t<Function>;
  using Kept = std::tuple<std::decay_t<Arguments>...>;
  const auto run = [&] {
    return std::invoke(std::forward<Function>(function), std::forward<Arguments>(arguments)...);
  };
  if (!c10::GradMode::is_enabled()) return run();
  Kept kept(std::as_const(arguments)...);
  std::vector<at::Tensor> inputs;
  std::apply([&](auto&... argument) { (internal::take_tensors(argument, inputs), ...); }, kept);
  auto recompute = [held = Held(std::as_const(function)),
                    kept = std::move(kept)](const std::vector<at::Tensor>& tensors) mutable {
    Kept again = kept;
    auto next = tensors.begin();
    std::apply([&](auto&... argument) { (internal::put_tensors(argument, next), ...); }, again);
    if constexpr (std::is_invocable_v<Held&, std::decay_t<Arguments>&...>) {
      std::apply(held, again);
    } else {
      std::apply(held, std::move(again));
    }
  };
  internal::ActivationScope scope(options, inputs, std::move(recompute));
  inputs.clear();
  if constexpr (std::is_void_v<decltype(run())>) {
    run();
    scope.complete();
  } else {
    auto result = run();
    scope.complete();
    return result;
  }
}

}  // namespace lockstep
