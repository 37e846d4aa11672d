#include <algorithm>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/base/environment.h>
#include <lockstep/device/copy_stream.h>
#include <lockstep/device/streams.h>

namespace lockstep {

std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void order_streams(const c10::Stream& earlier, const c10::Stream& later) {
  if (earlier == later) return;
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

void use_on_current_stream(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (const auto stream = current_stream(tensor.device())) tensor.record_stream(*stream);
}

void WritingStreams::note(c10::Device device) {
  const auto stream = current_stream(device);
  if (stream && std::find(streams_.begin(), streams_.end(), *stream) == streams_.end()) {
    streams_.push_back(*stream);
  }
}

void WritingStreams::join(c10::Device device) {
  if (const auto later = current_stream(device)) {
    for (const c10::Stream& stream : streams_) order_streams(stream, *later);
  }
  streams_.clear();
}

at::Tensor moved_to(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.device() == device) return tensor;
  // As in Python: anything but 1 switches it off.
  static const bool on_side = environment::text("PYTORCH_DDP_USE_SIDE_STREAM").value_or("1") == "1";
  if (!on_side || device.is_cpu()) return tensor.to(device);
  const CopyStream side(device);
  at::Tensor moved;
  // to() waits, so that the caller may change his tensor at once, as in Python.
  const c10::Event copied = side.run([&] { moved = tensor.to(device); });
  side.let_current_stream_wait(copied);
  side.used_by_current_stream(moved);
  return moved;
}

}  // namespace lockstep
