#pragma once

#include <sys/types.h>

namespace lockstep {

/// For signal handlers, which a forked child inherits with all that they read: where this process is not `owner`, which has
/// installed the handler, the signal gets its default action back, and does that as soon as the handler returns. True then: the
/// handler has nothing else to do. Async-signal-safe.
bool leave_signal_to_child(pid_t owner, int signal) noexcept;

}  // namespace lockstep
