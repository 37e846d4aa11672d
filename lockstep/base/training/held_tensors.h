#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

/// What a training keeps in memory from step to step. A recording of allocations does not show it, for it is older, or in memory
/// that torch's allocators do not know; so those who keep it tell of it, and a profiler asks.
namespace lockstep {

struct HeldTensors {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;  ///< and the memory that is kept for them
  std::vector<at::Tensor> optimizer_state;

  /// A parameter and its gradient, which may be undefined.
  void add(const at::Tensor& parameter) {
    parameters.push_back(parameter);
    gradients.push_back(parameter.grad());
  }
};

/// As long as it lives, `tell` adds to what held_tensors() gives in the thread that has made this: in another one gradients
/// may change while they are read. May be destroyed by any thread.
class TellingHeldTensors {
 public:
  using Tell = std::function<void(HeldTensors& held)>;

  explicit TellingHeldTensors(Tell tell);
  TellingHeldTensors(const TellingHeldTensors&) = delete;
  TellingHeldTensors& operator=(const TellingHeldTensors&) = delete;
  ~TellingHeldTensors();
};

/// Of models that Lockstep's wrappers have, of Trainers, and of what else tells of itself. Tensors may be there several times, or
/// share memory.
HeldTensors held_tensors();

}  // namespace lockstep
