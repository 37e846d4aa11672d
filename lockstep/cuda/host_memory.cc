#include <atomic>
#include <cuda_runtime_api.h>

#include <lockstep/base/log.h>
#include <lockstep/cuda/host_memory.h>

namespace lockstep {
namespace {

/// Says it once: it may concern hundreds of segments.
void warn_once(const char* what, cudaError_t error) {
  static std::atomic<bool> said{false};
  cudaGetLastError();  // or torch would find it after its own next call
  if (said.exchange(true)) return;
  LOCKSTEP_LOG(kWarning) << what << ": " << cudaGetErrorString(error)
                         << "; copies between this memory and GPUs are slower. See ulimit -l";
}

}  // namespace

bool CudaHostMemory::lock(void* begin, size_t bytes) noexcept {
  const cudaError_t error = cudaHostRegister(begin, bytes, cudaHostRegisterPortable);
  if (error == cudaSuccess) {
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess) {
      try {
        std::lock_guard lock(mutex_);
        device_of_[begin] = device;
      } catch (...) {  // unlocked on the device that is current then
      }
    }
    return true;
  }
  if (error == cudaErrorHostMemoryAlreadyRegistered) {
    cudaGetLastError();
    return true;
  }
  warn_once("shared memory can't be page-locked", error);
  return false;
}

void CudaHostMemory::unlock(void* begin) noexcept {
  int device = -1;
  {
    std::lock_guard lock(mutex_);
    if (const auto found = device_of_.find(begin); found != device_of_.end()) {
      device = found->second;
      device_of_.erase(found);
    }
  }
  int current = -1;
  // Or a thread that never chose a device would make a context on the first.
  const bool moved = device >= 0 && cudaGetDevice(&current) == cudaSuccess && current != device &&
                     cudaSetDevice(device) == cudaSuccess;
  const cudaError_t error = cudaHostUnregister(begin);
  if (moved) cudaSetDevice(current);
  if (error == cudaSuccess) return;
  cudaGetLastError();  // not registered, or CUDA's runtime has ended with the process
}

}  // namespace lockstep
