#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace lockstep {

/// What a communication hook is given: the gradients of some parameters, one after the other in a flat
/// tensor. torch.distributed.GradBucket, with its names.
///
/// Used by one thread at a time. The tensors share the bucket's memory, which is the reducer's again once the
/// hook's future is complete.
class GradBucket {
 public:
  /// `buffer`: one-dimensional, the gradients' elements in the parameters' order; or the sparse gradient of
  /// the only parameter.
  GradBucket(size_t index, at::Tensor buffer, std::vector<at::Tensor> parameters, bool is_last)
      : index_(index), buffer_(std::move(buffer)), parameters_(std::move(parameters)), is_last_(is_last) {}

  /// The bucket's place in the order of reduction, the same on all ranks.
  size_t index() const { return index_; }
  const at::Tensor& buffer() const { return buffer_; }
  /// Puts another tensor of as many elements in the buffer's place.
  void set_buffer(at::Tensor buffer) { buffer_ = std::move(buffer); }
  /// Views of the buffer, of the parameters' sizes. (Their strides are contiguous: where a parameter's are
  /// not, its elements stand in memory order.)
  std::vector<at::Tensor> gradients() const;
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  /// Whether it is the last bucket of this iteration.
  bool is_last() const { return is_last_; }

 private:
  size_t index_;
  at::Tensor buffer_;
  std::vector<at::Tensor> parameters_;
  bool is_last_;
};

/// Complete when the bucket is reduced; a future on a device (c10::ivalue::Future with its devices, such as
/// those of collectives and of then()) also orders the streams of the caller that waits. Its value is the
/// averaged tensor, of the buffer's number of elements (a tensor, or a list of one, as a collective's future
/// has).
using HookFuture = c10::intrusive_ptr<c10::ivalue::Future>;

/// Reduces a bucket instead of the built-in all-reduce: called when all of its gradients are there, on all
/// ranks in the same order, on the thread that runs backward(). It also divides by the world size.
/// torch.nn.parallel.DistributedDataParallel.register_comm_hook.
using CommunicationHook = std::function<HookFuture(GradBucket&)>;

/// The tensor in such a future's value.
at::Tensor tensor_of(const c10::IValue& value);
/// A future whose value is `next(value)`, made when `future` completes, on a communication thread. What a
/// collective's future holds, a list of one tensor, is unpacked. Errors pass through.
HookFuture then(const HookFuture& future, std::function<at::Tensor(const at::Tensor&)> next);
/// A future that is complete with this value: at once, on a device when its current stream has got here.
HookFuture completed_future(const at::Tensor& value);

}  // namespace lockstep
