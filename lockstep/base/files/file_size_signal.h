#pragma once

#include <csignal>
#include <ctime>

namespace lockstep {

/// While it lives, a write of this thread beyond the largest size of files (ulimit -f) fails with EFBIG, and
/// does not end the process by SIGXFSZ.
class FileSizeSignalBlock {
 public:
  FileSizeSignalBlock() {
    ::sigemptyset(&signal_);
    ::sigaddset(&signal_, SIGXFSZ);
    ::pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~FileSizeSignalBlock() {
    if (::sigismember(&before_, SIGXFSZ) == 1) return;
    // The kernel sends it to the thread that writes, where it waits now.
    const timespec no_time{};
    ::sigtimedwait(&signal_, nullptr, &no_time);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  FileSizeSignalBlock(const FileSizeSignalBlock&) = delete;
  FileSizeSignalBlock& operator=(const FileSizeSignalBlock&) = delete;

 private:
  sigset_t signal_{};
  sigset_t before_{};
};

}  // namespace lockstep
