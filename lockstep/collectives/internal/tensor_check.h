#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Throws c10::ValueError, with the remedy, unless collectives can read the tensor: defined, on the CPU, and
/// strided. `operation` begins the message.
void check_input(const at::Tensor& tensor, const char* operation);
/// The same for a tensor that the operation writes: its elements must not share memory either.
void check_output(const at::Tensor& tensor, const char* operation);
/// check_input(), and contiguous: for operations that see the tensor as one row of parts.
void check_contiguous(const at::Tensor& tensor, const char* operation, const char* name);

/// Throws unless all tensors have one dtype; a complex one counts as what it is made of.
void check_same_dtype(const at::Tensor& first, const std::vector<at::Tensor>& others, const char* operation);
/// Throws unless all tensors of the list have the very same dtype.
void check_one_dtype(const std::vector<at::Tensor>& list, const char* operation);
/// Throws unless the list has one tensor for each of `ranks` ranks.
void check_list_size(const std::vector<at::Tensor>& list, int ranks, const char* operation, const char* name);

/// The bytes of each rank's rows of `tensor` along dimension 0: `splits` rows each, or equal parts without
/// `splits`. Throws c10::ValueError if these don't make up the tensor. `name`: "input" or "output".
std::vector<size_t> split_bytes(const at::Tensor& tensor, const std::vector<int64_t>& splits, int ranks,
                                const char* name);

}  // namespace lockstep
