#pragma once

#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

#include <lockstep/base/unique_fd.h>

namespace lockstep {

/// An open file of its own for the terminal or pipe behind `fd`, whose writes fail with EAGAIN where those to `fd` would
/// wait: the flags of `fd` belong to other processes, too. Empty where there can be none: for files and sockets, and
/// without /proc.
inline UniqueFd reopen_nonblocking(int fd) {
  struct stat status = {};
  if (::fstat(fd, &status) != 0 || (!S_ISFIFO(status.st_mode) && ::isatty(fd) == 0)) return {};
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  return UniqueFd(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

}  // namespace lockstep
