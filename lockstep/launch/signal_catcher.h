#pragma once

#include <chrono>
#include <optional>
#include <signal.h>

namespace lockstep::launch {

/// While one lives, SIGINT, SIGTERM, SIGHUP, SIGQUIT, and SIGUSR1 and SIGUSR2 where the program has no handler for
/// them, no longer do what the program had set for them but can be read here, by poll(2) on fd() and take(). Signals
/// that the program ignores (under nohup, say) stay ignored. Nor is SIGCHLD ignored meanwhile: the kernel would throw the
/// workers' exit statuses away. After the last one's end the former dispositions are back. A handler and a pipe rather
/// than a signalfd: the program may have threads that have these signals unblocked. Several may live at once, each sees
/// every signal, but for two kinds that come after one that ends a job (any but SIGUSR2) and do not ask for haste: a SIGHUP,
/// for a terminal that closes sends two, its shell's and the kernel's; and the same signal within kTwice, for timeout(1) sends
/// its to the program and then to the process group. At most kMost.
class SignalCatcher {
 public:
  static constexpr int kMost = 16;
  static constexpr std::chrono::milliseconds kTwice{50};  // shorter than between two Ctrl-C that a user types

  SignalCatcher();
  SignalCatcher(const SignalCatcher&) = delete;
  SignalCatcher& operator=(const SignalCatcher&) = delete;
  ~SignalCatcher();

  int fd() const;
  /// The next signal that has come; nothing when there is none. Does not block.
  std::optional<int> take() const;

 private:
  int slot_ = -1;
  mutable int ended_by_ = 0;  // the first signal that was taken and ends a job; 0: none
  mutable std::chrono::steady_clock::time_point ended_at_;
};

}  // namespace lockstep::launch
