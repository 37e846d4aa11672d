#pragma once

namespace lockstep::launch {

/// From now on a line of this process's log (LOCKSTEP_LOG) waits no longer than a moment for a terminal that is stopped, or a
/// pipe without room, and is lost then: a launcher that waits there ends no workers and takes no signals. For the life of the
/// process.
void log_without_waiting();

}  // namespace lockstep::launch
