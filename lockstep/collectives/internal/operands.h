#pragma once

#include <deque>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/transport/shared_memory/group_channel.h>

namespace lockstep {

/// The contiguous memory that stands for the users' tensors during one operation: the tensors' own where that
/// is contiguous, else copies. Keeps both alive.
class Operands {
 public:
  explicit Operands(transport::GroupChannel& channel) : channel_(channel) {}

  /// The tensor's values.
  const at::Tensor& input(const at::Tensor& tensor);
  /// Memory for a result, whose content goes to the tensor in finish().
  const at::Tensor& output(const at::Tensor& tensor);
  /// Both.
  const at::Tensor& in_out(const at::Tensor& tensor);
  /// The tensor's values times `factor` (a number, or a tensor of one element), in shared memory.
  const at::Tensor& scaled(const at::Tensor& tensor, const at::Tensor& factor);
  /// Multiplies a buffer of this operation by `factor`, in place.
  static void scale(const at::Tensor& buffer, const at::Tensor& factor);
  /// The tensor's values in memory of their own: for inputs that the operation would overwrite too early.
  const at::Tensor& copy(const at::Tensor& tensor);
  /// Shared memory of this many elements.
  const at::Tensor& shared(int64_t numel, at::ScalarType dtype);
  /// The tensors' values one after the other, in shared memory.
  const at::Tensor& flattened(const std::vector<at::Tensor>& tensors);
  /// Has the parts of a flat buffer copied to the tensors in finish().
  void unflatten(const at::Tensor& buffer, const std::vector<at::Tensor>& tensors);
  /// Has `buffer`, whose shape may differ, copied to `tensor` in finish().
  void copy_back(const at::Tensor& tensor, const at::Tensor& buffer);

  /// Copies results back to tensors that have no memory of their own in the operation.
  void finish();

 private:
  const at::Tensor& keep(at::Tensor tensor);

  transport::GroupChannel& channel_;
  std::deque<at::Tensor> kept_;                            // references to them stay valid
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from
};

/// A flat, uninitialised tensor in the arena. Keeps the arena alive.
at::Tensor allocate_shared(transport::GroupChannel& channel, int64_t numel, at::TensorOptions options);

/// Whether the two tensors' memory has bytes in common.
bool memory_overlaps(const at::Tensor& a, const at::Tensor& b);

}  // namespace lockstep
