#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include <ATen/core/CachingHostAllocator.h>

#include <lockstep/device/host_memory.h>

namespace lockstep::testing::simulated {

/// Pinned host memory of the simulated device: torch's allocator of it, and the registrar for memory of
/// others. Pinned memory that a copy uses lives until that copy is done; registered memory is its owner's to
/// keep. Thread-safe.
class HostMemory final : public at::HostAllocator, public HostMemoryRegistrar {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* destination, const void* source, size_t bytes) const override;
  /// False, for copies hold the memory themselves.
  bool record_event(void* pointer, void* context, c10::Stream stream) override;
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool lock(void* begin, size_t bytes) noexcept override;
  void unlock(void* begin) noexcept override;

  /// Whether copies from and to this address may be asynchronous.
  bool is_pinned(const void* address);
  /// Whether it is this allocator's, not registered memory.
  bool owns(const void* address);
  int64_t registrations();
  int64_t registered_now();

 private:
  static void free_memory(void* begin);

  std::mutex mutex_;
  std::map<const char*, size_t> allocated_;
  std::map<const char*, size_t> registered_;
  int64_t registrations_ = 0;
};

/// The one there is, never destroyed.
HostMemory& host_memory();

}  // namespace lockstep::testing::simulated
