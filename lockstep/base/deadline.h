#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep {

/// A point in time by which something must have happened. Monotonic clock; a value type.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// `timeout` from now. A timeout of zero or less has already passed.
  static Deadline after(std::chrono::nanoseconds timeout) { return Deadline(Clock::now() + timeout); }
  /// A deadline that is never reached.
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  bool is_never() const { return at_ == Clock::time_point::max(); }
  bool expired() const { return !is_never() && Clock::now() >= at_; }

  /// Time left, never negative; at most `at_most`, which is also the answer for never().
  std::chrono::nanoseconds remaining(std::chrono::nanoseconds at_most = std::chrono::hours(24)) const {
    if (is_never()) return at_most;
    auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(at_ - Clock::now());
    return std::clamp(left, std::chrono::nanoseconds(0), at_most);
  }

  /// The same for poll(2): milliseconds, rounded up so that a poll never ends just before the deadline.
  int poll_milliseconds(std::chrono::milliseconds at_most = std::chrono::hours(1)) const {
    return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(remaining(at_most)).count());
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

/// A duration in seconds, for messages and statistics.
inline double to_seconds(std::chrono::nanoseconds duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace lockstep
