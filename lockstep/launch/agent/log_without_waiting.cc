#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <poll.h>
#include <string>
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

enum class Line : uint8_t {
  kWritten,
  kLost,
  kCut,  // its begin was written
};
std::atomic<Line> last_line{Line::kWritten};

void write_log_line(std::string_view line) {
  static const int nonblocking =
      reopen_nonblocking(STDERR_FILENO).release();  // never closed: threads log at the end, too
  const Line before = last_line.load(std::memory_order_relaxed);
  const std::string text = (before == Line::kCut ? "\n" : "") + std::string(line);
  std::string_view left = text;
  pollfd room = {nonblocking < 0 ? STDERR_FILENO : nonblocking, POLLOUT, 0};
  // Where many lines are lost, only the first is waited for, unless a part of a later one can be written.
  Deadline until = Deadline::after(before == Line::kWritten ? kPatience : std::chrono::milliseconds(0));
  do {
    if (::poll(&room, 1, until.poll_milliseconds()) != 1) continue;
    const ssize_t written = ::write(room.fd, left.data(), left.size());
    if (written < 0 && errno != EAGAIN && errno != EINTR) return;
    if (written > 0 && left.size() == text.size()) until = Deadline::after(kPatience);
    left.remove_prefix(static_cast<size_t>(std::max<ssize_t>(written, 0)));
  } while (!left.empty() && !until.expired());
  const bool cut = left.size() < text.size() || before == Line::kCut;
  last_line.store(left.empty() ? Line::kWritten : cut ? Line::kCut : Line::kLost, std::memory_order_relaxed);
}

}  // namespace

void log_without_waiting() {
  log::set_writer(write_log_line);
}

}  // namespace lockstep::launch
