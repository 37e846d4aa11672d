#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any_value.h>

/// The tensors in what one layer of a Sequential gives to the next. Its type is known to the layers alone, so
/// only these are looked into: a tensor; pairs, tuples of up to four, and vectors of tensors; what
/// torch::nn::LSTM returns.
namespace lockstep::pipeline::internal {

/// Those that are defined, in order. Throws c10::TypeError for other types, naming the value's.
std::vector<at::Tensor> tensors_of(const torch::nn::AnyValue& value);
/// Puts as many tensors in their places.
void set_tensors(torch::nn::AnyValue& value, const std::vector<at::Tensor>& tensors);

}  // namespace lockstep::pipeline::internal
