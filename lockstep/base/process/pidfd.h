#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <lockstep/base/unique_fd.h>

namespace lockstep {

/// pidfd_open(2): a descriptor that can be polled, and is readable once the process has ended. None, and
/// errno, without such a process and before Linux 5.3. (glibc 2.36 declares its function with C++ linkage, so
/// that C++ programs can't link it.)
inline UniqueFd open_pidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

/// Whether the process of a pidfd has ended; false without one.
inline bool process_has_ended(const UniqueFd& pidfd) {
  pollfd end{pidfd.get(), POLLIN, 0};
  return pidfd && ::poll(&end, 1, 0) > 0;
}

}  // namespace lockstep
