#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/FunctionRef.h>

namespace lockstep {

/// The process's stream for copies to a device, beside the one that computes: enqueues them there, and orders
/// their users after them. Of any kind of device that has streams. A device has one: the caching allocator
/// keeps freed memory by stream, so with streams of the pool in turn each would come to hold a batch's worth.
/// An object is used by one thread at a time; several may use one device's stream.
class CopyStream {
 public:
  /// A stream of `device`, or of the current one of its kind if it names none.
  explicit CopyStream(c10::Device device);

  c10::Device device() const { return stream_.device(); }
  /// Runs `enqueue` with this stream current; the event comes when all of it is done.
  c10::Event run(c10::function_ref<void()> enqueue) const;
  /// The calling thread's current stream goes on after the event only.
  void let_current_stream_wait(const c10::Event& event) const;
  /// Memory that was allocated on this stream is not given to others before the calling thread's current
  /// stream is done with what it has when the tensor goes. Nothing for tensors on other devices.
  void used_by_current_stream(const at::Tensor& tensor) const;

 private:
  c10::Stream stream_;
};

}  // namespace lockstep
