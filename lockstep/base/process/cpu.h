#pragma once

#include <sys/types.h>
#include <vector>

namespace lockstep {

/// A set of cores, as sched_setaffinity(2) takes it, on machines of any size.
class CoreMask {
 public:
  explicit CoreMask(const std::vector<int>& cores);
  /// Those that this thread may run on.
  static CoreMask current();

  std::vector<int> cores() const;  ///< ascending
  /// Lets a thread (0: this one) and what it starts from now on run on these cores alone, as far as it may.
  /// False, and errno, where the kernel refuses: it may use none of them. Async-signal-safe.
  bool apply(pid_t thread) const;

 private:
  std::vector<unsigned long> words_;
};

/// Cores that this process may run on (its affinity mask), at least 1.
int usable_cores();

/// Which CPU this thread runs on now; some nanoseconds.
int current_cpu();

/// Moves this thread to another CPU of its affinity mask, if there is one, and leaves the mask as it was.
/// Some 50 µs; at most every 100 ms in one thread, more often it does nothing.
void move_to_another_cpu();

}  // namespace lockstep
