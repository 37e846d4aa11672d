#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <lockstep/serialization/state_dict.h>

namespace lockstep {

/// How the options and the state of one kind of optimizer look in Python's optimizer.state_dict(). LibTorch's
/// own are known. An optimizer of yours says it by deriving from this, too:
///
///     class Lion : public torch::optim::Optimizer, public lockstep::OptimizerFormat { … };
///
/// and a third party's by a class of yours that derives from both. All functions are const and are called by
/// one thread at a time.
class OptimizerFormat {
 public:
  virtual ~OptimizerFormat() = default;

  /// Python's name of the class, for messages.
  virtual std::string optimizer_name() const = 0;

  /// False: there is one state for all parameters together, which means nothing in another order.
  virtual bool has_state_per_parameter() const { return true; }

  /// A parameter group's options, under Python's names and with all keys that Python's class has.
  virtual StateDict get_options(const torch::optim::OptimizerOptions& options) const = 0;
  /// Takes them. Throws, and has changed nothing, when one is missing, or means what this optimizer can't do.
  /// Keys that it doesn't know may be left out.
  virtual void set_options(const StateDict& from, torch::optim::OptimizerOptions& options) const = 0;

  /// One parameter's state. Tensors may share the optimizer's memory.
  virtual StateDict get_state(const torch::optim::OptimizerParamState& state) const = 0;
  /// The state of `parameter`, in memory of its own, in the parameter's dtype and on its device; null for
  /// none. `options` are those of its group, as loaded. Throws when something is missing or does not fit.
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state(
      const StateDict& from, const at::Tensor& parameter,
      const torch::optim::OptimizerOptions& options) const = 0;
};

/// What formats are written with. They throw c10::ValueError that names the key.
namespace optimizer_format {

/// A step counter as Python keeps it: a tensor of no dimensions on the CPU, float32 where that is exact.
at::Tensor step_tensor(int64_t step);
/// The counter from such a tensor, or from a number.
int64_t step_at(const StateDict& state, const std::string& key = "step");
/// A number, or a tensor of one element.
double number_at(const StateDict& state, const std::string& key);
/// A copy in the dtype (where both are floating point) and on the device of `parameter`.
at::Tensor copy_for(const at::Tensor& parameter, const at::Tensor& value);
/// The tensor of `key` as copy_for() makes it, of the parameter's sizes.
at::Tensor tensor_like(const at::Tensor& parameter, const StateDict& state, const std::string& key);
/// The same, or an undefined tensor when there is none, or None.
at::Tensor optional_tensor_like(const at::Tensor& parameter, const StateDict& state, const std::string& key);
/// Whether the key is there, and not None.
bool has(const StateDict& state, const std::string& key);
/// Throws when the key is there and true: `optimizer` would do something else than Python does.
void refuse_true(const StateDict& options, const std::string& key, const std::string& optimizer);

}  // namespace optimizer_format
}  // namespace lockstep
