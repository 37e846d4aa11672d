#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <lockstep/data/internal/copy_stream.h>
#include <lockstep/device/accelerator.h>

namespace lockstep::data::internal {

CopyStream::CopyStream(c10::Device device) : stream_(copy_stream(device)) {}

c10::Event CopyStream::run(c10::function_ref<void()> enqueue) const {
  const c10::StreamGuard current(stream_);
  enqueue();
  c10::Event done(stream_.device_type());
  done.record(stream_);
  return done;
}

c10::Stream CopyStream::current_stream() const {
  return c10::impl::getDeviceGuardImpl(stream_.device_type())->getStream(stream_.device());
}

void CopyStream::let_current_stream_wait(const c10::Event& event) const {
  event.block(current_stream());
}

void CopyStream::used_by_current_stream(const at::Tensor& tensor) const {
  if (tensor.device() != stream_.device()) return;
  tensor.record_stream(current_stream());
}

}  // namespace lockstep::data::internal
