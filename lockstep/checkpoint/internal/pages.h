#pragma once

#include <cstddef>
#include <vector>

#include <c10/core/DeviceType.h>

namespace lockstep::checkpoint::internal {

/// Memory for many bytes at once, in huge pages where the kernel has some: a gigabyte of small pages costs a
/// fifth of a second for their first touch alone. Not thread-safe.
class Pages {
 public:
  Pages() = default;
  /// Throws c10::OutOfMemoryError.
  explicit Pages(size_t bytes);
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages();

  /// Has at least so many bytes from now on; what was in it is lost if they are more than before.
  void reserve(size_t bytes);
  /// Has it page-locked for this kind of device from now on, so that copies from there are fast, and can run
  /// beside the program. Nothing for the CPU, and where it can't be, which the log says.
  void lock_for(c10::DeviceType type);
  char* data() const { return static_cast<char*>(data_); }

 private:
  void release();
  std::vector<c10::DeviceType> locked_for_;
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace lockstep::checkpoint::internal
