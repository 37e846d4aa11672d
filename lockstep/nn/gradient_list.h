#pragma once

#include <map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

/// What works on all parameters or gradients at once: clipping, unscaling. Thread-safe for different tensors.
namespace lockstep {

/// Each defined one once, in order: LibTorch lists a parameter with two names twice.
std::vector<at::Tensor> each_once(const std::vector<at::Tensor>& tensors);

/// The gradients of those `parameters` that have one, in order; of each parameter once.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters);

/// Tensors by device type, device index and dtype: each value fits into one call of a foreach function.
using ForeachGroups =
    std::map<std::pair<c10::DeviceType, std::pair<int, at::ScalarType>>, std::vector<at::Tensor>>;
ForeachGroups group_by_device_and_dtype(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep
