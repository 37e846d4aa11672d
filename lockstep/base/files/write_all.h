#pragma once

#include <cerrno>
#include <cstddef>
#include <poll.h>
#include <string_view>
#include <unistd.h>

namespace lockstep {

/// write(2), again where it took a part or a signal interrupted it, and where another process has made the open file
/// non-blocking: once there is room. How many bytes were written: all, or fewer and errno.
inline size_t write_all(int fd, std::string_view bytes) {
  size_t written = 0;
  while (written < bytes.size()) {
    const ssize_t more = ::write(fd, bytes.data() + written, bytes.size() - written);
    if (more < 0 && errno == EINTR) continue;
    if (more < 0 && errno == EAGAIN) {
      pollfd room = {fd, POLLOUT, 0};
      ::poll(&room, 1, -1);
      continue;
    }
    if (more == 0) errno = ENOSPC;
    if (more <= 0) break;
    written += static_cast<size_t>(more);
  }
  return written;
}

}  // namespace lockstep
