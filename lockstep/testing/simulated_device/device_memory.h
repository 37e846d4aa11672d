#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <lockstep/testing/simulated_device/simulated_device.h>

namespace lockstep::testing::simulated {

/// The memory of all simulated devices: torch's allocator for them. Each device's addresses are a range of
/// their own, which no thread may touch; the memory itself lies after that range, at host_address().
/// Thread-safe.
///
/// A freed block is filled with NaN and offered again when the stream that it was allocated on, and those of
/// recordStream(), have got there.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  DeviceMemory();

  c10::DataPtr allocate(size_t bytes) override;  // on the calling thread's current device
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* destination, const void* source, size_t bytes) const override;

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  /// (free, total) bytes of the limit.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

  /// Where the bytes at a device address really are. Only for what runs in a stream's order.
  static char* host_address(const void* device_address);
  /// The device whose memory this is, -1 for host memory.
  c10::DeviceIndex device_of(const void* address) const;

  size_t allocated(c10::DeviceIndex device);
  void set_limit(c10::DeviceIndex device, size_t bytes);
  size_t limit(c10::DeviceIndex device);

 private:
  struct Block {
    size_t bytes;     // counted
    size_t capacity;  // of its size class
    c10::Stream stream;
    std::vector<c10::Stream> other_streams;
  };
  struct Device {
    char* begin = nullptr;
    size_t used = 0;  // bytes of the range that were ever given out
    size_t allocated = 0;
    size_t limit = size_t{1} << 30;
    std::map<char*, Block> blocks;
    std::multimap<size_t, char*> free;  // by capacity
    c10::CachingDeviceAllocator::DeviceStats stats;
  };

  static void free_block(void* address);
  void release(c10::DeviceIndex index, char* address, size_t capacity);

  std::mutex mutex_;
  std::vector<Device> devices_;
};

/// The one there is, never destroyed.
DeviceMemory& device_memory();

}  // namespace lockstep::testing::simulated
