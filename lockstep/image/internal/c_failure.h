#pragma once

#include <array>
#include <csetjmp>
#include <cstdio>

namespace lockstep::image::internal {

/// How libjpeg's and libpng's calls fail: their error handler must not return, and must not throw through C
/// code. So it leaves the message here and jumps back to run().
class CFailure {
 public:
  /// Runs `call`, which holds nothing with a destructor; true unless fail() was called meanwhile.
  template <class Call>
  [[nodiscard]] bool run(const Call& call) {
    if (setjmp(place_) != 0) return false;
    call();
    return true;
  }
  /// Only within run().
  [[noreturn]] void fail(const char* message) {
    std::snprintf(message_.data(), message_.size(), "%s", message);
    std::longjmp(place_, 1);
  }
  const char* message() const { return message_.data(); }

 private:
  std::jmp_buf place_{};
  std::array<char, 256> message_{};
};

}  // namespace lockstep::image::internal
