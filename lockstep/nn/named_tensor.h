#pragma once

#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// A parameter or buffer with its dotted name in the module.
using NamedTensor = std::pair<std::string, at::Tensor>;

}  // namespace lockstep
