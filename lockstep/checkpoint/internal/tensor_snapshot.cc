#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <lockstep/checkpoint/internal/tensor_file.h>
#include <lockstep/checkpoint/internal/tensor_snapshot.h>
#include <lockstep/device/streams.h>

namespace lockstep::checkpoint::internal {
namespace {

// Up to this size tensors are copied at once in any case: a forward changes the buffers of BatchNorm.
constexpr int64_t kSmall = int64_t{1} << 20;
// What a thread copies at least, so that small models are not handed around.
constexpr int64_t kCopyGrain = int64_t{4} << 20;

/// Values from places all over a tensor, of at least as many bytes, that lies in one piece. A step of an optimizer changes
/// nearly all values, and to read all would take as long as to copy them.
std::vector<uint64_t> sample_of(const at::Tensor& tensor) {
  constexpr size_t kPlaces = 64;
  std::vector<uint64_t> sample(kPlaces);
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  const size_t distance = tensor.nbytes() / kPlaces;
  for (size_t i = 0; i < kPlaces; ++i) std::memcpy(&sample[i], data + i * distance, sizeof sample[i]);
  return sample;
}

/// memcpy of many parts by torch's threads, shared out by bytes, not by parts: one may be nearly all.
struct Copy {
  char* to;
  const char* from;
  int64_t bytes;
  int64_t before;  // bytes of the parts before it
};

at::Tensor blob_like(char* data, const at::Tensor& tensor) {
  return at::from_blob(data, tensor.sizes().vec(), at::TensorOptions().dtype(tensor.scalar_type()));
}

void copy_parts(const std::vector<Copy>& copies, int64_t bytes) {
  at::parallel_for(0, bytes, kCopyGrain, [&](int64_t begin, int64_t end) {
    auto copy = std::upper_bound(copies.begin(), copies.end(), begin,
                                 [](int64_t at, const Copy& part) { return at < part.before + part.bytes; });
    for (; copy != copies.end() && copy->before < end; ++copy) {
      const int64_t first = std::max<int64_t>(begin - copy->before, 0);
      const int64_t last = std::min(end - copy->before, copy->bytes);
      std::memcpy(copy->to + first, copy->from + first, static_cast<size_t>(last - first));
    }
  });
}

/// For destructors: the memory that copies write into is about to be reused. A device that fails copies nothing more.
void await_events(const std::vector<c10::Event>& events) noexcept {
  try {
    for (const auto& event : events) event.synchronize();
  } catch (...) {
  }
}

/// Copies of tensors on devices into the host's memory, many at once. They take the values that the current
/// stream of each device will have made by now.
class CopiesToHost {
 public:
  CopiesToHost() = default;
  CopiesToHost(const CopiesToHost&) = delete;
  CopiesToHost& operator=(const CopiesToHost&) = delete;
  ~CopiesToHost() {
    if (!finished_) await_events(finish());
  }

  /// `beside`: on a stream beside the current one, which goes on meanwhile and must leave `from` alone.
  void copy(const at::Tensor& from, at::Tensor& to, bool beside) {
    const c10::StreamGuard current(stream_for(from.device(), beside));
    to.copy_(from, /*non_blocking=*/true);
  }

  /// What marks the copies' ends.
  std::vector<c10::Event> finish() {
    std::vector<c10::Event> ends;
    for (const Lane& lane : lanes_) ends.emplace_back(lane.stream.device_type()).record(lane.stream);
    finished_ = true;
    return ends;
  }

 private:
  struct Lane {
    bool beside;
    c10::Stream stream;
  };

  c10::Stream stream_for(c10::Device device, bool beside) {
    for (const Lane& lane : lanes_) {
      if (lane.stream.device() == device && lane.beside == beside) return lane.stream;
    }
    const c10::Stream current = *current_stream(device);
    if (!beside) return lanes_.emplace_back(beside, current).stream;
    const c10::Stream stream = c10::impl::getDeviceGuardImpl(device.type())->getStreamFromGlobalPool(device);
    order_streams(current, stream);
    return lanes_.emplace_back(beside, stream).stream;
  }

  std::vector<Lane> lanes_;
  bool finished_ = false;
};

}  // namespace

TensorSnapshot::~TensorSnapshot() {
  await_events(device_copies_);
}

void TensorSnapshot::copy(const std::vector<serialization::StateTensor*>& tensors, Pages& memory,
                          bool later) {
  const auto padded = [](int64_t size) {
    return (size + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
  };
  int64_t needed = 0;
  std::set<c10::DeviceType> types;
  for (const serialization::StateTensor* each : tensors) {
    needed += padded(static_cast<int64_t>(each->tensor.nbytes()));
    types.insert(each->tensor.device().type());
  }
  memory.reserve(static_cast<size_t>(needed));
  for (const auto type : types) memory.lock_for(type);
  char* to = memory.data();
  CopiesToHost from_devices;
  std::vector<Copy> copies;
  std::vector<at::Tensor> originals;  // must live until they are copied
  int64_t bytes = 0;
  for (serialization::StateTensor* each : tensors) {
    at::Tensor& tensor = each->tensor;
    const auto size = static_cast<int64_t>(tensor.nbytes());
    if (size == 0) continue;
    const bool can_wait = later && size > kSmall && !tensor.is_inference();
    const bool plain = tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
    at::Tensor copy = blob_like(to, tensor);
    if (!tensor.is_cpu()) from_devices.copy(tensor.detach(), copy, /*beside=*/can_wait);
    if (can_wait && (plain || !tensor.is_cpu())) {
      rest_.push_back({each, to, static_cast<uint32_t>(tensor._version()),
                       tensor.is_cpu() ? sample_of(tensor) : std::vector<uint64_t>()});
    } else {
      if (plain) {
        copies.push_back({to, static_cast<const char*>(tensor.const_data_ptr()), size, bytes});
        bytes += size;
      } else if (tensor.is_cpu()) {
        copy.copy_(tensor.detach());
      }
      originals.push_back(std::exchange(tensor, std::move(copy)));
    }
    to += padded(size);
  }
  copy_parts(copies, bytes);
  device_copies_ = from_devices.finish();
  if (!later) await_device_copies();
}

void TensorSnapshot::await_device_copies() {
  for (const auto& copy : device_copies_) copy.synchronize();
  device_copies_.clear();
}

void TensorSnapshot::copy_rest() {
  await_device_copies();
  for (const Rest& rest : std::exchange(rest_, {})) {
    at::Tensor& tensor = rest.tensor->tensor;
    if (tensor.is_cpu()) std::memcpy(rest.to, tensor.const_data_ptr(), tensor.nbytes());
    const bool is_same = static_cast<uint32_t>(tensor._version()) == rest.version &&
                         (!tensor.is_cpu() || sample_of(tensor) == rest.sample);
    TORCH_CHECK_VALUE(is_same, "tensor '", rest.tensor->name, "' of ", rest.tensor->part,
                      " was changed while it was copied; with copy_later call finish_copy() before the "
                      "optimizer's step()");
    tensor = blob_like(rest.to, tensor);
  }
}

}  // namespace lockstep::checkpoint::internal
