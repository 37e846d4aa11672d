#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace lockstep {

/// What the kernel and the control group still let this process have.
struct MemoryLimits {
  int64_t available = std::numeric_limits<int64_t>::max();    // bytes: MemAvailable of /proc/meminfo
  int64_t cgroup_left = std::numeric_limits<int64_t>::max();  // bytes below the tightest cgroup limit
};

MemoryLimits read_memory_limits();

/// Throws c10::OutOfMemoryError when `bytes` more of shared memory would not fit. Needed because a memfd
/// knows no ENOSPC: pages beyond the limit bring the out-of-memory killer. `purpose` begins the message.
void check_memory_available(int64_t bytes, std::string_view purpose);

/// "25.0 MiB"
std::string format_bytes(int64_t bytes);

}  // namespace lockstep
