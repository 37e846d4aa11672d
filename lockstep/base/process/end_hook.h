#pragma once

#include <atomic>

namespace lockstep {

/// Called with the signal by whichever of the library's handlers comes last before the default action ends
/// the process; null: nothing to do. Async-signal-safe. Rooms that know nothing of each other handle the same
/// signals: this way the first to come does what the others would have done.
inline std::atomic<void (*)(int signal)> before_default_end{nullptr};

}  // namespace lockstep
