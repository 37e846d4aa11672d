// What torch asks of a device: its guard, whose presence autograd looks for, and its hooks.
#include <atomic>
#include <chrono>
#include <mutex>

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <lockstep/testing/simulated_device/device_memory.h>
#include <lockstep/testing/simulated_device/generator.h>
#include <lockstep/testing/simulated_device/host_memory.h>
#include <lockstep/testing/simulated_device/kernels.h>
#include <lockstep/testing/simulated_device/simulated_device.h>
#include <lockstep/testing/simulated_device/streams.h>

namespace lockstep::testing::simulated {
namespace {

std::atomic<int64_t> device_synchronizations{0};
std::atomic<int64_t> emptied_caches{0};

Event* event_at(void* event) {
  return static_cast<Event*>(event);
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {c10::kPrivateUse1, device.has_index() ? exchange_device(device.index()) : current_device()};
  }
  c10::Device getDevice() const override { return {c10::kPrivateUse1, current_device()}; }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return current_stream_of(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream_of(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return pool_stream_of(device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return pool_stream_of(device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_host_synchronization();
    queue_of(stream).synchronize();
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    ++device_synchronizations;
    synchronize_device(index);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex index,
              c10::EventFlag flag) const override {
    TORCH_CHECK(index == -1 || index == stream.device_index(), "Event device index ", static_cast<int>(index),
                " does not match recording stream's device index ", static_cast<int>(stream.device_index()),
                ".");
    if (*event == nullptr) *event = new Event(flag == c10::EventFlag::BACKEND_DEFAULT);
    auto recording = std::make_shared<Recording>();
    {
      std::lock_guard lock(event_at(*event)->mutex);
      event_at(*event)->latest = recording;
    }
    queue_of(stream).submit_or_run([recording] { recording->complete(); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    auto recording = event_at(event)->recording();
    if (recording && !recording->done()) queue_of(stream).submit([recording] { recording->wait(); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    auto recording = event_at(event)->recording();
    return !recording || recording->done();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    count_host_synchronization();
    if (auto recording = event_at(event)->recording()) recording->wait();
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex /*index*/) const override {
    TORCH_CHECK(first != nullptr && second != nullptr,
                "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(event_at(first)->timing && event_at(second)->timing,
                "Both events must be created with argument 'enable_timing=True'.");
    auto begin = event_at(first)->recording(), end = event_at(second)->recording();
    TORCH_CHECK(begin->done() && end->done(),
                "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(end->time() - begin->time()).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete event_at(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_memory().recordStream(pointer, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange_device(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
  bool isPinnedPtr(const void* address) const override { return host_memory().is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_memory(); }
  c10::Device getDeviceFromPtr(void* address) const override {
    auto index = device_memory().device_of(address);
    TORCH_CHECK(index >= 0, "the pointer is not into the memory of a simulated device");
    return {c10::kPrivateUse1, index};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return make_generator(index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    grow_storage(storage, bytes);
  }
};

// At the program's start, for autograd makes a thread for each device that has a guard at the first
// backward().
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

}  // namespace

void register_device() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::SetAllocator(c10::kPrivateUse1, &device_memory());
    at::setHostAllocator(c10::kPrivateUse1, &host_memory());
    set_host_memory_registrar(c10::kPrivateUse1, &host_memory());
    register_kernels();
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    c10::register_privateuse1_backend("sim");
  });
}

void DeviceMemory::emptyCache(c10::MempoolId_t /*pool*/) {
  ++emptied_caches;
}

Counters counters() {
  auto result = counted();
  result.device_synchronizations = device_synchronizations;
  result.registrations = host_memory().registrations();
  result.registered_now = host_memory().registered_now();
  result.emptied_caches = emptied_caches;
  return result;
}

size_t allocated_bytes(c10::DeviceIndex device) {
  return device_memory().allocated(device);
}
void set_memory_limit(c10::DeviceIndex device, size_t bytes) {
  device_memory().set_limit(device, bytes);
}
size_t memory_limit(c10::DeviceIndex device) {
  return device_memory().limit(device);
}

}  // namespace lockstep::testing::simulated
