#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace lockstep {

/// What the kernel and the control group still let this process have.
struct MemoryLimits {
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  int64_t available = kNone;     // bytes: MemAvailable of /proc/meminfo
  int64_t cgroup_limit = kNone;  // bytes: the tightest limit of the control group and its ancestors
  /// Bytes that the group which leaves least still lets this process have. The kernel takes the page cache of
  /// files back before it refuses memory, so this counts as left, as it does in MemAvailable.
  int64_t cgroup_left = kNone;
};

/// `root`: where /proc and /sys are, for tests.
MemoryLimits read_memory_limits(const std::string& root = "");

/// Throws c10::OutOfMemoryError when `bytes` more of shared memory would not fit. Needed because a memfd
/// knows no ENOSPC: pages beyond the limit bring the out-of-memory killer. `purpose` begins the message.
void check_memory_available(int64_t bytes, std::string_view purpose);

/// The size of a page of the system: 4 KiB, and 16 or 64 KiB on some machines with ARM or POWER processors.
size_t page_bytes();

/// "25.0 MiB"
std::string format_bytes(int64_t bytes);

}  // namespace lockstep
