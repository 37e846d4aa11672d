#pragma once

#include <functional>

namespace lockstep::flight::internal {

/// Runs a function in a thread of its own for each SIGUSR1 that this process gets (several that come together
/// count as one), and whenever wake() asks. One for each process.
///
/// The handler does nothing but sem_post(3), which is allowed there. In a forked child it reaches only the
/// child's copy of the semaphore, so nothing happens.
class SignalWatcher {
 public:
  using Action = std::function<void(bool signalled)>;

  /// Installs the handler and starts the thread; false, and nothing is done, when the program handles or
  /// ignores SIGUSR1. Does nothing more when it runs already.
  static bool start(Action action);
  /// Ends the thread after the call of `action` in progress. The handler stays, and does nothing.
  static void stop();
  /// Calls the action soon, if the thread runs.
  static void wake();
};

}  // namespace lockstep::flight::internal
