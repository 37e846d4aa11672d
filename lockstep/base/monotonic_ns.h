#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep {

/// Nanoseconds of the host's monotonic clock, which its processes share. Thread-safe.
inline int64_t monotonic_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace lockstep
