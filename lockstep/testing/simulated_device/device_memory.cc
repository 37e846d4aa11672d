#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/testing/simulated_device/device_memory.h>
#include <lockstep/testing/simulated_device/streams.h>

namespace lockstep::testing::simulated {
namespace {

/// Addresses of one device, and the distance from an address to its memory. Nothing of it is used before it
/// is written to.
constexpr size_t kRange = size_t{1} << 33;
/// As CUDA's allocator counts.
constexpr size_t kGranularity = 512;
/// NaN in every floating-point type, -1 in integers.
constexpr int kPoison = 0xFF;

size_t rounded(size_t bytes) {
  return (bytes + kGranularity - 1) / kGranularity * kGranularity;
}

/// The next of four sizes for each power of two, so that freed blocks fit again.
size_t size_class(size_t bytes) {
  size_t step = std::max(kGranularity, std::bit_floor(bytes) / 4);
  return (bytes + step - 1) / step * step;
}

constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

}  // namespace

DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory();
  return *memory;
}

DeviceMemory::DeviceMemory() : devices_(kDevices) {
  for (auto& device : devices_) {
    auto* range = ::mmap(nullptr, 2 * kRange, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(range != MAP_FAILED, "no addresses for a simulated device: ", std::strerror(errno));
    device.begin = static_cast<char*>(range);
    TORCH_CHECK(::mprotect(device.begin + kRange, kRange, PROT_READ | PROT_WRITE) == 0,
                "no memory for a simulated device: ", std::strerror(errno));
  }
}

char* DeviceMemory::host_address(const void* device_address) {
  return static_cast<char*>(const_cast<void*>(device_address)) + kRange;
}

c10::DeviceIndex DeviceMemory::device_of(const void* address) const {
  for (c10::DeviceIndex index = 0; index < kDevices; ++index) {
    const auto* begin = devices_[index].begin;
    if (address >= begin && address < begin + kRange) return index;
  }
  return -1;
}

c10::DataPtr DeviceMemory::allocate(size_t bytes) {
  auto index = current_device();
  c10::Device where(c10::kPrivateUse1, index);
  if (bytes == 0) return {nullptr, nullptr, &free_block, where};
  std::lock_guard lock(mutex_);
  auto& device = devices_[index];
  auto counted = rounded(bytes);
  auto capacity = size_class(counted);
  auto reusable = device.free.find(capacity);
  bool fits = device.allocated + counted <= device.limit &&
              (reusable != device.free.end() || device.used + capacity <= kRange);
  if (!fits) ++device.stats.num_ooms;
  TORCH_CHECK_WITH(OutOfMemoryError, fits, "sim out of memory. Tried to allocate ", counted,
                   " bytes. Device ", static_cast<int>(index), " has a limit of ", device.limit,
                   " bytes, of which ", device.allocated, " are in use.");
  char* address = nullptr;
  if (reusable != device.free.end()) {
    address = reusable->second;
    device.free.erase(reusable);
  } else {
    address = device.begin + std::exchange(device.used, device.used + capacity);
    std::memset(host_address(address), kPoison, capacity);
  }
  device.blocks.emplace(address, Block{counted, capacity, current_stream_of(index), {}});
  device.allocated += counted;
  device.stats.allocation[kAggregate].increase(1);
  device.stats.allocated_bytes[kAggregate].increase(counted);
  return {address, address, &free_block, where};
}

c10::DeleterFnPtr DeviceMemory::raw_deleter() const {
  return &free_block;
}

void DeviceMemory::free_block(void* address) {
  if (address == nullptr) return;
  auto& memory = device_memory();
  auto index = memory.device_of(address);
  auto* begin = static_cast<char*>(address);
  std::vector<c10::Stream> streams;
  size_t capacity = 0;
  {
    std::lock_guard lock(memory.mutex_);
    auto& device = memory.devices_[index];
    auto block = device.blocks.find(begin);
    TORCH_INTERNAL_ASSERT(block != device.blocks.end(), "freed twice: ", address);
    device.allocated -= block->second.bytes;
    device.stats.allocation[kAggregate].decrease(1);
    device.stats.allocated_bytes[kAggregate].decrease(block->second.bytes);
    capacity = block->second.capacity;
    streams = std::move(block->second.other_streams);
    streams.push_back(block->second.stream);
    device.blocks.erase(block);
  }
  auto awaited = std::make_shared<std::atomic<size_t>>(streams.size());
  for (const auto& stream : streams) {
    queue_of(stream).submit_or_run([awaited, index, begin, capacity] {
      if (awaited->fetch_sub(1) == 1) device_memory().release(index, begin, capacity);
    });
  }
}

void DeviceMemory::release(c10::DeviceIndex index, char* address, size_t capacity) {
  std::memset(host_address(address), kPoison, capacity);
  std::lock_guard lock(mutex_);
  devices_[index].free.emplace(capacity, address);
}

void DeviceMemory::copy_data(void* destination, const void* source, size_t bytes) const {
  if (bytes == 0) return;
  auto index = device_of(destination);
  current_queue(index).run([&] { std::memcpy(host_address(destination), host_address(source), bytes); });
}

void DeviceMemory::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  if (!pointer) return;
  std::lock_guard lock(mutex_);
  auto& device = devices_[pointer.device().index()];
  auto block = device.blocks.find(static_cast<char*>(pointer.get()));
  if (block == device.blocks.end() || block->second.stream == stream) return;
  auto& others = block->second.other_streams;
  if (std::find(others.begin(), others.end(), stream) == others.end()) others.push_back(stream);
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  return devices_.at(device).stats;
}

void DeviceMemory::resetAccumulatedStats(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  auto& stats = devices_.at(device).stats;
  stats.allocation[kAggregate].reset_accumulated();
  stats.allocated_bytes[kAggregate].reset_accumulated();
  stats.num_ooms = 0;
}

void DeviceMemory::resetPeakStats(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  auto& stats = devices_.at(device).stats;
  stats.allocation[kAggregate].reset_peak();
  stats.allocated_bytes[kAggregate].reset_peak();
}

std::pair<size_t, size_t> DeviceMemory::getMemoryInfo(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  const auto& state = devices_.at(device);
  return {state.limit > state.allocated ? state.limit - state.allocated : 0, state.limit};
}

size_t DeviceMemory::allocated(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  return devices_.at(device).allocated;
}

void DeviceMemory::set_limit(c10::DeviceIndex device, size_t bytes) {
  std::lock_guard lock(mutex_);
  devices_.at(device).limit = bytes;
}

size_t DeviceMemory::limit(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  return devices_.at(device).limit;
}

}  // namespace lockstep::testing::simulated
