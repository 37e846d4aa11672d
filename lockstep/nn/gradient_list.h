#pragma once

#include <map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

/// What works on all gradients at once: clipping, unscaling. Thread-safe for different tensors.
namespace lockstep {

/// The gradients of those `parameters` that have one, in order. A parameter that is listed twice, as LibTorch
/// lists those with two names, counts once.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters);

/// Tensors by device type, device index and dtype: each value fits into one call of a foreach function.
using ForeachGroups =
    std::map<std::pair<c10::DeviceType, std::pair<int, at::ScalarType>>, std::vector<at::Tensor>>;
ForeachGroups group_by_device_and_dtype(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep
