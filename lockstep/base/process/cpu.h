#pragma once

namespace lockstep {

/// Cores that this process may run on (its affinity mask), at least 1.
int usable_cores();

/// Which CPU this thread runs on now; some nanoseconds.
int current_cpu();

/// Moves this thread to another CPU of its affinity mask, if there is one, and leaves the mask as it was.
/// Some 50 µs; at most every 100 ms in one thread, more often it does nothing.
void move_to_another_cpu();

}  // namespace lockstep
