#pragma once

#include <fcntl.h>

namespace lockstep {

/// Standard streams that are closed become /dev/null: what is opened next would get their numbers, and what is
/// written to the streams would go there, into shared memory say. To be called before the library, or a launcher,
/// opens anything.
inline void open_standard_streams() {
  for (int fd = 0; fd < 3; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", O_RDWR);  // takes the lowest free number, which is fd
  }
}

}  // namespace lockstep
