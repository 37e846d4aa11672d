#pragma once

#include <functional>

namespace lockstep {

/// Runs `task` at once on a background thread: an idle one, or a new one if all are busy, so that tasks which
/// wait for peers never wait for each other. A thread that has been idle for a second ends; the number of
/// threads is the number of tasks in progress, plus a few. Tasks must not throw. They take no signals.
/// The owner of what a task uses makes sure that the task has returned before it destroys that. Thread-safe;
/// a forked child starts with no threads. False, with a warning the first time, where the system gives no thread:
/// the task does not run then.
bool run_in_background(std::function<void()> task);

/// Threads of run_in_background() that now exist, for tests.
int background_thread_count();

}  // namespace lockstep
