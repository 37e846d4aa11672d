#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/nn/named_tensor.h>
#include <lockstep/parallel/fsdp/options.h>

namespace lockstep {

class FsdpCore;

namespace fsdp {

/// What each FullyShardedDataParallel is, whatever it wraps. One that lies within the module of another is a part of that
/// from then on: the outer one has the weights, the optimizer and the states, and the part has its forward alone.
class AnyWrapper {
 public:
  AnyWrapper(const AnyWrapper&) = delete;
  AnyWrapper& operator=(const AnyWrapper&) = delete;
  virtual ~AnyWrapper() = default;

  /// The module's parameters and buffers as they are now, those of wrappers within it among them, in definition order; a shared
  /// one as often as it has names.
  virtual std::vector<NamedTensor> module_parameters() const = 0;
  virtual std::vector<NamedTensor> module_buffers() const = 0;

 protected:
  explicit AnyWrapper(MixedPrecision precision) : precision_(precision) {}
  /// Once, when it is constructed. The parts that `core` has taken over belong to it.
  void set_core(std::shared_ptr<FsdpCore> core);
  bool is_part() const { return core_ == nullptr; }
  /// Throws c10::Error in a part.
  const std::shared_ptr<FsdpCore>& core() const;

  void run_forward(const std::function<void()>& forward);
  /// Whether forward gets its tensors as prepare_input() makes them: on the model's device, and with mixed precision in its
  /// dtype.
  bool prepares_inputs() const { return casts_inputs() || moves_inputs(); }
  at::Tensor prepare_input(const at::Tensor& tensor) const;

 private:
  friend class lockstep::FsdpCore;

  bool casts_inputs() const;
  bool moves_inputs() const;

  const MixedPrecision precision_;
  std::shared_ptr<FsdpCore> core_;  // none in a part
  std::weak_ptr<FsdpCore> whole_;   // of a part
};

/// A wrapper within a module.
struct Part {
  std::string name;  // in the module
  std::shared_ptr<AnyWrapper> wrapper;
};

/// The wrappers that are a module or within it, each once, without those within them, in definition order.
std::vector<Part> parts_of(const torch::nn::Module& module);

/// named_parameters() and named_buffers() of a module with parts, whose own stand in their places.
std::vector<NamedTensor> parameters_with_parts(const torch::nn::Module& module);
std::vector<NamedTensor> buffers_with_parts(const torch::nn::Module& module);

}  // namespace fsdp
}  // namespace lockstep
