#include <c10/core/StreamGuard.h>

#include <lockstep/device/accelerator.h>
#include <lockstep/device/copy_stream.h>
#include <lockstep/device/streams.h>

namespace lockstep {

CopyStream::CopyStream(c10::Device device) : stream_(copy_stream(device)) {}

c10::Event CopyStream::run(c10::function_ref<void()> enqueue) const {
  const c10::StreamGuard current(stream_);
  enqueue();
  c10::Event done(stream_.device_type());
  done.record(stream_);
  return done;
}

void CopyStream::let_current_stream_wait(const c10::Event& event) const {
  event.block(*current_stream(stream_.device()));
}

void CopyStream::used_by_current_stream(const at::Tensor& tensor) const {
  if (tensor.device() == stream_.device()) use_on_current_stream(tensor);
}

}  // namespace lockstep
