#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

/// Orders work on a device's streams. Nothing here waits; the CPU has no streams.
namespace lockstep {

/// The calling thread's current stream of `device`; nothing for the CPU.
std::optional<c10::Stream> current_stream(c10::Device device);

/// What is put into `later` from now on waits for what is in `earlier` now.
void order_streams(const c10::Stream& earlier, const c10::Stream& later);

/// The tensor is used on the calling thread's current stream, too: should it be freed, its memory is not
/// handed out again before that use is over. For tensors that a future's callback holds besides the future's
/// value. Does nothing for undefined tensors and on the CPU.
void use_on_current_stream(const at::Tensor& tensor);

/// The streams on which the parts of a tensor were written, until one reads it as a whole. Used by one thread
/// at a time.
class WritingStreams {
 public:
  /// The calling thread's current stream of `device` is one.
  void note(c10::Device device);
  /// The calling thread's current stream of `device` waits for all of them; they are forgotten.
  void join(c10::Device device);
  void clear() { streams_.clear(); }

 private:
  std::vector<c10::Stream> streams_;
};

/// The tensor on `device`. What comes from elsewhere is copied on the CopyStream, which the current stream
/// then waits for, so that the copy may run beside earlier work; unless PYTORCH_DDP_USE_SIDE_STREAM is 0.
/// Autograd goes through it. torch/distributed/utils.py, _recursive_to.
at::Tensor moved_to(const at::Tensor& tensor, c10::Device device);

}  // namespace lockstep
