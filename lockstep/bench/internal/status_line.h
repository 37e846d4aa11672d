#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <unistd.h>

namespace lockstep::bench::internal {

/// A line on a terminal that says what is going on when that takes more than a second, and that goes when
/// there is something to print. Not thread-safe.
class StatusLine {
 public:
  using Clock = std::chrono::steady_clock;

  /// `enabled`: whether to write at all; for the one rank that prints, where standard error is a terminal.
  explicit StatusLine(bool enabled, int fd = STDERR_FILENO,
                      std::function<Clock::time_point()> now = &Clock::now);
  /// clear().
  ~StatusLine();
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  /// Shows make_text(), at most every 100 ms, and from one second after the last clear() on. The text has no
  /// control characters.
  void show(const std::function<std::string()>& make_text);
  /// Takes the line away and starts its second anew.
  void clear();

 private:
  void write(const std::string& text) const;

  bool enabled_;
  int fd_;
  std::function<Clock::time_point()> now_;
  bool shown_ = false;
  Clock::time_point next_;
};

/// What takes the line away: to the line's first column, and empty from there.
inline constexpr const char* kClearLine = "\r\x1b[K";

}  // namespace lockstep::bench::internal
