#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/ddp/options.h>

namespace lockstep {

/// What a forward changes besides its outputs, as it was before the step: the state of the CPU's default
/// random number generator, and buffers if they are given. For putting it back when the step fails. Used by
/// one thread at a time.
class StepSnapshot {
 public:
  StepSnapshot();
  StepSnapshot(const StepSnapshot&) = delete;
  StepSnapshot& operator=(const StepSnapshot&) = delete;
  ~StepSnapshot();

  /// Some 100 ns, and a copy of the buffers.
  void take(const std::vector<NamedTensor>& buffers);
  bool taken() const { return taken_; }
  /// Puts everything back; does nothing if nothing was taken.
  void restore();
  /// The step succeeded.
  void drop();

 private:
  struct Random;
  bool taken_ = false;
  std::unique_ptr<Random> random_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;  // the tensor, its values
};

}  // namespace lockstep
