#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::collectives::internal {

/// Throws c10::ValueError, with the remedy, unless collectives can read the tensor: defined, on the CPU or an
/// accelerator, and strided. `operation` begins the message.
void check_input(const at::Tensor& tensor, const char* operation);
/// The same for a tensor that the operation writes: its elements must not share memory either.
void check_output(const at::Tensor& tensor, const char* operation);
/// check_input(), and contiguous: for operations that see the tensor as one row of parts.
void check_contiguous(const at::Tensor& tensor, const char* operation, const char* name);

/// Throws unless the device is the CPU or an accelerator, whose tensors pass through the host.
void check_device(const at::Tensor& tensor, const char* operation);

/// Throws unless all tensors are on one device and have one dtype; a complex one counts as what it is made
/// of.
void check_same_kind(const at::Tensor& first, const std::vector<at::Tensor>& others, const char* operation);
/// Throws unless all tensors of the list are on one device and have the very same dtype.
void check_one_kind(const std::vector<at::Tensor>& list, const char* operation);
/// Throws unless `other` has `tensor`'s device, dtype and sizes; complex numbers and pairs of real ones may
/// stand for each other.
void check_like(const at::Tensor& other, const at::Tensor& tensor, const char* operation,
                const std::string& name);
void check_list_like(const std::vector<at::Tensor>& list, const at::Tensor& tensor, const char* operation,
                     const char* name);
/// Throws unless `whole` has `parts` times the elements of `part`; both are checked as inputs.
void check_parts(const at::Tensor& whole, const char* whole_name, const at::Tensor& part,
                 const char* part_name, int parts, const char* operation);
/// Throws unless what a rank gives to itself is what it takes from itself: known before any rank is
/// waited for.
void check_own_part(size_t given, size_t taken, const char* operation);
/// Throws unless the list has one tensor for each of `ranks` ranks.
void check_list_size(const std::vector<at::Tensor>& list, int ranks, const char* operation, const char* name);

/// The bytes of each rank's rows of `tensor` along dimension 0: `splits` rows each, or equal parts without
/// `splits`. Throws c10::ValueError if these don't make up the tensor. `name`: "input" or "output".
std::vector<size_t> split_bytes(const at::Tensor& tensor, const std::vector<int64_t>& splits, int ranks,
                                const char* name);

}  // namespace lockstep::collectives::internal
