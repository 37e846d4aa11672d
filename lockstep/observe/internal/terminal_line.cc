#include <mutex>
#include <unistd.h>

#include <lockstep/base/files/write_all.h>
#include <lockstep/base/log_writer.h>
#include <lockstep/base/process/per_process.h>
#include <lockstep/observe/internal/terminal_line.h>

namespace lockstep::observe::internal {
namespace {

constexpr const char* kToStart = "\r";
constexpr const char* kClearRest = "\x1b[K";  // what was longer before

struct Drawn {
  std::mutex mutex;
  int fd = -1;  // none
  std::string text;
};

// Another one in a forked child: there no thread may hold the lock, and nothing is drawn.
PerProcess<Drawn> drawn_line;

void write_log_line(std::string_view line) {
  write_above_terminal_line(STDERR_FILENO, line);
}

}  // namespace

void draw_terminal_line(int fd, const std::string& text) {
  log::set_writer(write_log_line);
  Drawn& drawn = drawn_line.get();
  const std::lock_guard lock(drawn.mutex);
  drawn.fd = fd;
  drawn.text = text;
  write_all(fd, kToStart + text + kClearRest);
}

void end_terminal_line(int fd, const std::string& text) {
  Drawn& drawn = drawn_line.get();
  const std::lock_guard lock(drawn.mutex);
  drawn.fd = -1;
  write_all(fd, kToStart + text + kClearRest + "\n");
}

void write_above_terminal_line(int fd, std::string_view lines) {
  Drawn& drawn = drawn_line.get();
  const std::lock_guard lock(drawn.mutex);
  if (drawn.fd < 0) {
    write_all(fd, lines);
    return;
  }
  const std::string clear = std::string(kToStart) + kClearRest;
  const std::string again = kToStart + drawn.text + kClearRest;
  if (drawn.fd == fd) {
    write_all(fd, clear + std::string(lines) + again);
    return;
  }
  write_all(drawn.fd, clear);
  write_all(fd, lines);
  write_all(drawn.fd, again);
}

}  // namespace lockstep::observe::internal
