#pragma once

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/backend/internal/device_copies.h>
#include <lockstep/transport/group_channel.h>

namespace lockstep::collectives::internal {

/// The contiguous host memory that stands for the users' tensors during one operation: the tensors' own where
/// they are contiguous CPU tensors, else copies. Keeps both alive.
///
/// Tensors on a device, all on one, have their copies in shared memory; these hold the values once start()
/// has returned, and must not be read before.
class Operands {
 public:
  /// `area`, of the group, must outlive the calls that follow up to submission.
  Operands(transport::GroupChannel& channel, const std::shared_ptr<StagingArea>& area)
      : channel_(channel), area_(area) {}
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;
  ~Operands();

  /// The tensor's values.
  const at::Tensor& input(const at::Tensor& tensor);
  /// Memory for a result, whose content goes to the tensor in finish().
  const at::Tensor& output(const at::Tensor& tensor);
  /// Both.
  const at::Tensor& in_out(const at::Tensor& tensor);
  /// The tensor's values times `factor` (a number, or a tensor of one element on the CPU or the tensor's
  /// device), in shared memory.
  const at::Tensor& scaled(const at::Tensor& tensor, const at::Tensor& factor);
  /// Multiplies a buffer of this operation by `factor`, in place.
  void scale(const at::Tensor& buffer, const at::Tensor& factor);
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

  /// The copies from and to this device, begun now at the latest. For what tensors have besides their values.
  DeviceCopies& on_device(c10::Device device);
  /// Null for CPU tensors.
  std::shared_ptr<DeviceResults> device_results() const { return device_ ? device_->results() : nullptr; }

  /// Waits until the buffers hold the values, as DeviceCopies::await_fetched() does.
  void start(const Deadline& deadline) {
    if (device_) start_on_device(deadline);
  }
  /// Copies results back to tensors that have no memory of their own in the operation; to a device, starts
  /// to.
  void finish();

 private:
  const at::Tensor& keep(at::Tensor tensor);
  void start_on_device(const Deadline& deadline);

  transport::GroupChannel& channel_;
  const std::shared_ptr<StagingArea>& area_;
  std::deque<at::Tensor> kept_;                            // references to them stay valid
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from
  std::shared_ptr<DeviceCopies> device_;
  // Of tensors on a device:
  std::vector<std::pair<at::Tensor, at::Tensor>> to_scale_;                   // buffer, factor
  std::vector<std::pair<std::vector<at::Tensor>, at::Tensor>> flat_results_;  // to, from
};

/// Whether the two tensors' memory has bytes in common.
bool memory_overlaps(const at::Tensor& a, const at::Tensor& b);

}  // namespace lockstep::collectives::internal
