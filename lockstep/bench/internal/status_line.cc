#include <utility>

#include <lockstep/bench/internal/status_line.h>

namespace lockstep::bench::internal {
namespace {

constexpr std::chrono::seconds kPatience{1};
constexpr std::chrono::milliseconds kInterval{100};

}  // namespace

StatusLine::StatusLine(bool enabled, int fd, std::function<Clock::time_point()> now)
    : enabled_(enabled), fd_(fd), now_(std::move(now)), next_(now_() + kPatience) {}

StatusLine::~StatusLine() {
  clear();
}

void StatusLine::show(const std::function<std::string()>& make_text) {
  if (!enabled_) return;
  const auto now = now_();
  if (now < next_) return;
  write(kClearLine + make_text());
  shown_ = true;
  next_ = now + kInterval;
}

void StatusLine::clear() {
  if (!enabled_) return;
  if (shown_) write(kClearLine);
  shown_ = false;
  next_ = now_() + kPatience;
}

void StatusLine::write(const std::string& text) const {
  [[maybe_unused]] const auto written = ::write(fd_, text.data(), text.size());  // a lost line is no loss
}

}  // namespace lockstep::bench::internal
