#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <lockstep/collectives/algorithms/algorithms.h>

namespace lockstep::collectives::internal {

/// Throws c10::ValueError unless all_reduce() can take the sparse tensor with this operation.
void check_sparse(const at::Tensor& tensor, const c10d::ReduceOp& operation, const char* name);

/// Sums sparse COO CPU tensors of one size, whose indices may differ by rank, in rank order. `mine` is
/// coalesced, and so is the sum. Three operations of the channel: the numbers of elements, the indices, the
/// values.
at::Tensor sum_sparse(transport::GroupChannel& channel, const algorithms::Terms& terms,
                      const Signature& signature, const at::Tensor& mine);
/// The same of any sparse COO CPU tensors, of which each rank has one or more; the sum replaces `tensors`.
void all_reduce_sparse(transport::GroupChannel& channel, const algorithms::Terms& terms,
                       const Signature& signature, const std::vector<at::Tensor>& tensors);

}  // namespace lockstep::collectives::internal
