#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/device/generator_state.h>
#include <lockstep/nn/named_tensor.h>

namespace lockstep {

/// What a forward changes besides its outputs, as it was before the step: the state of the default random
/// number generators of the CPU and of the model's devices, and buffers if they are given. For putting it
/// back when the step fails. Used by one thread at a time.
class StepSnapshot {
 public:
  /// `devices`: those besides the CPU.
  explicit StepSnapshot(std::vector<at::Device> devices = {});
  StepSnapshot(const StepSnapshot&) = delete;
  StepSnapshot& operator=(const StepSnapshot&) = delete;

  /// Some 100 ns, one or two µs for each device, and a copy of the buffers.
  void take(const std::vector<NamedTensor>& buffers);
  bool taken() const { return taken_; }
  /// Puts everything back; does nothing if nothing was taken. Waits for all that the devices have to do.
  void restore();
  /// The step succeeded.
  void drop();

 private:
  const std::vector<at::Device> devices_;
  bool taken_ = false;
  GeneratorStates random_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;  // the tensor, its values
};

}  // namespace lockstep
