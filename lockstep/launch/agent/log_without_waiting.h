#pragma once

namespace lockstep::launch {

/// From now on a line of this process's log (LOCKSTEP_LOG) waits no longer than a moment for a terminal that is stopped, or
/// a pipe without room, and is lost then, or its rest: a launcher that waits there ends no workers and takes no signals.
/// Standard error must be a file that can be opened anew (a socket can't), or long lines wait. For the life of the process.
/// Lines of several threads may be mixed where they are cut.
void log_without_waiting();

}  // namespace lockstep::launch
