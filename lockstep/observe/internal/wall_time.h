#pragma once

#include <chrono>

namespace lockstep::observe::internal {

/// Seconds since 1970 by this machine's clock, as Python's time.time().
inline double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace lockstep::observe::internal
