#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <poll.h>
#include <string_view>
#include <sys/types.h>
#include <unistd.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/files/nonblocking.h>
#include <lockstep/base/log_writer.h>
#include <lockstep/launch/agent/log_without_waiting.h>

namespace lockstep::launch {
namespace {

constexpr std::chrono::milliseconds kPatience{100};  // with a reader who only lags behind the workers' output

void write_log_line(std::string_view line) {
  static const int nonblocking =
      reopen_nonblocking(STDERR_FILENO).release();  // never closed: threads log at the end, too
  pollfd room = {nonblocking < 0 ? STDERR_FILENO : nonblocking, POLLOUT, 0};
  const Deadline until = Deadline::after(kPatience);
  do {
    if (::poll(&room, 1, until.poll_milliseconds()) != 1) continue;
    const ssize_t written = ::write(room.fd, line.data(), line.size());
    if (written < 0 && errno != EAGAIN && errno != EINTR) return;
    line.remove_prefix(static_cast<size_t>(std::max<ssize_t>(written, 0)));
  } while (!line.empty() && !until.expired());
}

}  // namespace

void log_without_waiting() {
  log::set_writer(write_log_line);
}

}  // namespace lockstep::launch
