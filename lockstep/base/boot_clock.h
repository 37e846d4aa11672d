#pragma once

#include <chrono>
#include <ctime>

namespace lockstep {

/// Time since the host was booted, with the time in which it was suspended: a host that wakes up finds its lease
/// over (std::chrono::steady_clock stands still meanwhile). Not comparable between hosts.
struct BootClock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<BootClock>;
  static constexpr bool is_steady = true;

  static time_point now() {
    timespec now = {};
    ::clock_gettime(CLOCK_BOOTTIME, &now);
    return time_point(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec));
  }
};

using BootTime = BootClock::time_point;

}  // namespace lockstep
