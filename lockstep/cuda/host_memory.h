#pragma once

#include <map>
#include <mutex>

#include <lockstep/device/host_memory.h>

namespace lockstep {

/// Page-locks host memory for CUDA (cudaHostRegister), for all devices. The first call makes a CUDA context
/// on the thread's current device, so the process should have chosen its device. Thread-safe.
class CudaHostMemory final : public HostMemoryRegistrar {
 public:
  bool lock(void* begin, size_t bytes) noexcept override;
  void unlock(void* begin) noexcept override;

 private:
  std::mutex mutex_;
  std::map<void*, int> device_of_;  // current when the memory was locked, and for its unlocking again
};

}  // namespace lockstep
