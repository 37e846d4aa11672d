#include <cmath>

#include <ATen/ops/scalar_tensor.h>

#include <lockstep/optim/optimizer_format.h>

namespace lockstep::optimizer_format {

at::Tensor step_tensor(int64_t step) {
  const bool exact = static_cast<int64_t>(static_cast<float>(step)) == step;
  return at::scalar_tensor(step, at::TensorOptions(exact ? at::kFloat : at::kDouble));
}

bool has(const StateDict& state, const std::string& key) {
  const auto found = state.find(key);
  return found != state.end() && !found->second.isNone();
}

double number_at(const StateDict& state, const std::string& key) {
  const auto found = state.find(key);
  TORCH_CHECK_VALUE(found != state.end(), "there is no '", key, "'");
  const c10::IValue& value = found->second;
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 1 &&
      !value.toTensor().is_complex()) {
    return value.toTensor().item<double>();
  }
  if (value.isBool()) return value.toBool() ? 1 : 0;
  TORCH_CHECK_VALUE(value.isInt() || value.isDouble(), "'", key, "' is no number, but of type ",
                    value.tagKind());
  return value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
}

int64_t step_at(const StateDict& state, const std::string& key) {
  const auto found = state.find(key);
  if (found != state.end() && found->second.isInt() && found->second.toInt() >= 0) {
    return found->second.toInt();
  }
  const double step = number_at(state, key);
  constexpr double kMost = 9e15;  // up to here a double counts
  TORCH_CHECK_VALUE(step >= 0 && step <= kMost && step == std::floor(step), "'", key, "' is ", step,
                    ", which is no number of steps");
  return static_cast<int64_t>(step);
}

at::Tensor copy_for(const at::Tensor& parameter, const at::Tensor& value) {
  const bool cast = parameter.is_floating_point() && value.is_floating_point();
  return value.detach().to(parameter.device(), cast ? parameter.scalar_type() : value.scalar_type(),
                           /*non_blocking=*/false, /*copy=*/true);
}

at::Tensor tensor_like(const at::Tensor& parameter, const StateDict& state, const std::string& key) {
  const auto found = state.find(key);
  TORCH_CHECK_VALUE(found != state.end(), "there is no '", key, "'");
  TORCH_CHECK_VALUE(found->second.isTensor() && found->second.toTensor().defined(), "'", key,
                    "' is no tensor, but of type ", found->second.tagKind());
  const at::Tensor& value = found->second.toTensor();
  TORCH_CHECK_VALUE(value.sizes() == parameter.sizes(), "'", key, "' has sizes ", value.sizes(),
                    ", the parameter ", parameter.sizes());
  return copy_for(parameter, value);
}

at::Tensor optional_tensor_like(const at::Tensor& parameter, const StateDict& state, const std::string& key) {
  return has(state, key) ? tensor_like(parameter, state, key) : at::Tensor();
}

void refuse_true(const StateDict& options, const std::string& key, const std::string& optimizer) {
  if (!has(options, key) || number_at(options, key) == 0) return;
  TORCH_CHECK_VALUE(false, "'", key, "' is true, which LibTorch's ", optimizer, " doesn't have");
}

}  // namespace lockstep::optimizer_format
