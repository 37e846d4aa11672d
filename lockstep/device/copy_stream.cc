#include <map>
#include <mutex>
#include <utility>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <lockstep/device/copy_stream.h>
#include <lockstep/device/streams.h>

namespace lockstep {
namespace {

/// `device`: the current one of its kind if it names none.
c10::Stream stream_for_copies(c10::Device device) {
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, c10::Stream> streams;
  const auto* devices = c10::impl::getDeviceGuardImpl(device.type());
  const c10::Device numbered(device.type(),
                             device.has_index() ? device.index() : devices->getDevice().index());
  const std::lock_guard lock(mutex);
  const std::pair key(numbered.type(), numbered.index());
  auto stream = streams.find(key);
  if (stream == streams.end()) {
    stream = streams.emplace(key, devices->getStreamFromGlobalPool(numbered)).first;
  }
  return stream->second;
}

}  // namespace

CopyStream::CopyStream(c10::Device device) : stream_(stream_for_copies(device)) {}

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
