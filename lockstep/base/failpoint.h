#pragma once

#include <atomic>
#include <string_view>

/// Places where a test can make something go wrong, compiled into every build.
///
/// LOCKSTEP_FAILPOINTS="NAME=ACTION[;NAME=ACTION…]", ACTION one of
///   exit(STATUS)          ends the process with _exit
///   kill(SIGNAL)          sends the calling thread the signal (9: crash, 19: stop, of the whole process)
///   error(TEXT)           throws c10::Error with the text
///   delay(MILLISECONDS)   waits
///   errno(NUMBER)         the system call at that place fails with this error number
/// and optionally "@COUNT" after it: acts at the COUNT-th pass (from 1) only. A malformed variable ends the
/// program at its start. With the variable unset a failpoint costs one relaxed load.
namespace lockstep::failpoint {

namespace internal {
extern std::atomic<bool> armed;
int pass(std::string_view name);
}  // namespace internal

/// Call where the failure should strike. Thread-safe.
inline void here(std::string_view name) {
  if (internal::armed.load(std::memory_order_relaxed)) internal::pass(name);
}

/// Call in front of a system call: the error number with which it shall fail, by errno(NUMBER); 0: make the
/// call. Other actions act as in here(). Thread-safe.
inline int fails_with(std::string_view name) {
  return internal::armed.load(std::memory_order_relaxed) ? internal::pass(name) : 0;
}

/// Replaces the configuration (tests with ranks as threads or after start). Same syntax; empty disarms.
void configure(std::string_view specification);

}  // namespace lockstep::failpoint
