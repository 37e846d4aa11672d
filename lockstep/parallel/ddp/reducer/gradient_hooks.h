#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::autograd {
struct Node;
}

namespace lockstep {

/// Is told by autograd, in the thread that runs backward, of each gradient that it accumulates.
class GradientObserver {
 public:
  virtual void before_gradient(size_t parameter) = 0;
  /// `incoming`: what autograd has added to the gradient, or made it of, and still holds.
  virtual void on_gradient(size_t parameter, const at::Tensor& incoming) = 0;

 protected:
  ~GradientObserver() = default;
};

/// Hooks on the nodes that accumulate parameters' gradients (AccumulateGrad), which hold the observer weakly.
/// Used by one thread at a time.
class GradientHooks {
 public:
  using Accumulators = std::unordered_map<const torch::autograd::Node*, size_t>;  // to the parameter

  /// Hooks the parameters' accumulators until this object goes. Once.
  void attach(std::weak_ptr<GradientObserver> observer, const std::vector<at::Tensor>& parameters);
  /// Hooks the accumulators that the parameters have now. Parameters have the same ones as long as the answer
  /// lives; the hooks live as long as these.
  [[nodiscard]] std::vector<std::shared_ptr<void>> attach_to_current(
      const std::vector<at::Tensor>& parameters);
  /// Those that were hooked last.
  const Accumulators& accumulators() const { return accumulators_; }

 private:
  std::pair<const void*, uintptr_t> hook(torch::autograd::Node& accumulator, size_t parameter);

  std::weak_ptr<GradientObserver> observer_;
  Accumulators accumulators_;
  std::vector<std::shared_ptr<void>> removers_;
};

}  // namespace lockstep
