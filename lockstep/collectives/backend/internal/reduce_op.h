#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <lockstep/collectives/kernels/reduce_kernels.h>

namespace lockstep::collectives::internal {

/// A user's reduce operation in our terms.
struct Reducing {
  ReduceOperation operation;
  at::Tensor factor;  // of PREMUL_SUM: each rank's data are multiplied by it before the sum; else undefined
  const ReduceKernels& kernels;
};

/// Throws c10::ValueError when the operation can't be applied to tensors like `tensor`. PREMUL_SUM without
/// its factor, and operations on complex numbers that PyTorch refuses, are among these. `name` of the
/// collective begins the message.
Reducing reducing_of(const c10d::ReduceOp& operation, const at::Tensor& tensor, const char* name);

}  // namespace lockstep::collectives::internal
