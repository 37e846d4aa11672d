#pragma once

#include <cstdint>

/// A process that ends by exit() or a signal (abort and an uncaught exception among them) waits, for a second
/// at most, until the library's threads have written what was handed to them: the last thing that a training
/// logs is often why it ended.
namespace lockstep::observe::internal {

/// Puts the waiting into place: at exit, before SIGSEGV, SIGBUS, SIGILL, SIGFPE and SIGABRT, and before
/// SIGTERM, SIGINT and SIGHUP where they would end the process. Handlers that are there run afterwards, and
/// the process ends as it would have. Cheap when it is in place already. Thread-safe.
void flush_at_exit();

/// So many more records are waiting, or fewer when negative. Thread-safe.
void add_pending_records(int64_t count);

}  // namespace lockstep::observe::internal
