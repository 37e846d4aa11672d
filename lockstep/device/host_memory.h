#pragma once

#include <cstddef>

#include <c10/core/DeviceType.h>

namespace lockstep {

/// Tells a kind of device about host memory that it copies from and to, so that its copies need not stop the
/// program ("pinned", "page-locked" memory). One for each kind of device, installed by the library that knows
/// it (liblockstep_cuda calls cudaHostRegister). Thread-safe; never throws.
class HostMemoryRegistrar {
 public:
  virtual ~HostMemoryRegistrar() = default;
  /// Whether `bytes` at `begin` are page-locked now. Where they can't be (a limit on locked memory, say), it
  /// says so in the log, once, and copies are slower but right.
  virtual bool lock(void* begin, size_t bytes) noexcept = 0;
  /// Undoes lock(); before the memory is unmapped, when no copy uses it.
  virtual void unlock(void* begin) noexcept = 0;
};

/// Installs the registrar of a kind of device, for the life of the process; null takes it away.
void set_host_memory_registrar(c10::DeviceType device, HostMemoryRegistrar* registrar);
/// Null where there is none.
HostMemoryRegistrar* host_memory_registrar(c10::DeviceType device);

}  // namespace lockstep
