#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Throws c10::ValueError, with the remedy, unless collectives can work on the tensor: defined, on the CPU,
/// strided, dense in memory, no lazy view. `operation` begins the message.
void check_tensor(const at::Tensor& tensor, const char* operation);

}  // namespace lockstep
