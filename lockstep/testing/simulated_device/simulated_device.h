#pragma once

#include <cstddef>
#include <cstdint>

#include <c10/core/Device.h>

/// A device that exists in this process alone, as torch's PrivateUse1: what a GPU demands of programs,
/// without one. It is there for tests of device code, and as strict as it can be:
///
/// - Streams are threads with queues. Copies between device memory and pinned host memory, copies within the
///   device, and what enqueue() adds run there while the host goes on; other copies stop the host, as on
///   CUDA.
/// - Device memory can't be read at its address: code that dereferences a device tensor's data_ptr() on the
///   host ends with SIGSEGV. New and freed memory is filled with NaN, freed memory in the order of the stream
///   that it was allocated on (and of those recorded by record_stream), so that a missing event gives wrong
///   numbers.
/// - Kernels are the CPU's, on copies, run in the current stream's order: results are the CPU's bits. Unlike
///   a GPU's they stop the host until they are done. Tensors of two devices don't mix, as on CUDA.
/// - Each device has a limit of memory, and a generator of random numbers of its own.
///
/// Thread-safe. Streams, threads and memory live as long as the process.
namespace lockstep::testing::simulated {

inline constexpr c10::DeviceIndex kDevices = 2;

/// Makes the device torch's accelerator, called "sim". Once; later calls do nothing.
void register_device();

/// What has happened in this process so far, what kernels do for themselves left out.
struct Counters {
  int64_t host_to_device_bytes = 0;
  int64_t device_to_host_bytes = 0;
  int64_t device_to_device_bytes = 0;
  /// Waits of the host for a stream, an event, or a copy that is not asynchronous.
  int64_t host_synchronizations = 0;
  /// Waits for a whole device.
  int64_t device_synchronizations = 0;
  /// Registrations of host memory by the HostMemoryRegistrar; and of these, those in force.
  int64_t registrations = 0;
  int64_t registered_now = 0;
  /// Calls of emptyCache().
  int64_t emptied_caches = 0;
};
Counters counters();

/// Bytes of the device that tensors hold now.
size_t allocated_bytes(c10::DeviceIndex device);

/// From now on an allocation that would make them more than `bytes` throws c10::OutOfMemoryError. 1 GiB at
/// first.
void set_memory_limit(c10::DeviceIndex device, size_t bytes);
size_t memory_limit(c10::DeviceIndex device);

/// A limit while it lives: `bytes` more than is allocated now.
class MemoryLimit {
 public:
  MemoryLimit(c10::DeviceIndex device, size_t bytes) : device_(device), before_(memory_limit(device)) {
    set_memory_limit(device, allocated_bytes(device) + bytes);
  }
  ~MemoryLimit() { set_memory_limit(device_, before_); }
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

 private:
  c10::DeviceIndex device_;
  size_t before_;
};

}  // namespace lockstep::testing::simulated
