#pragma once

#include <chrono>
#include <functional>
#include <signal.h>
#include <vector>

#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep::train::internal {

/// While it lives, these signals no longer end the process but are noted. When `deadline` has passed since
/// the first of them, and it still lives, `too_late` is called in a thread of its own. Afterwards the former
/// dispositions are back. One at a time in a process (c10::Error otherwise).
class StopSignals {
 public:
  StopSignals(std::vector<int> signals, std::chrono::nanoseconds deadline, std::function<void()> too_late);
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  ~StopSignals();

  /// The first signal that has come, 0 before. Any thread may ask.
  int received() const;

 private:
  void watch(std::chrono::nanoseconds deadline, const std::function<void()>& too_late);

  std::vector<std::pair<int, struct sigaction>> former_;
  UniqueFd came_;  // an eventfd that the handler writes to
  UniqueFd done_;  // and one that ends the thread
  BackgroundThread watchdog_;
};

}  // namespace lockstep::train::internal
