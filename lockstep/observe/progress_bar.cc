#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <sys/ioctl.h>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/base/text/lower_case.h>
#include <lockstep/base/text/terminal_text.h>
#include <lockstep/observe/internal/terminal_line.h>
#include <lockstep/observe/progress_bar.h>

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kRedrawInterval{100};
constexpr std::chrono::seconds kLineInterval{1};        // no log line sooner than that after another
constexpr std::chrono::seconds kHeartbeatInterval{60};  // no longer without one
constexpr int kLines = 10;                              // log lines for a known total
constexpr double kSmoothing = 0.3;                      // tqdm's: the weight of the newest interval
constexpr int kShortestBar = 4;
constexpr int kDefaultWidth = 80;

double seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

/// Line breaks and escape sequences of a description or a postfix would tear the line.
std::string without_control_characters(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return std::iscntrl(c) != 0; }, ' ');
  return text;
}

/// 02:05, or 1:02:05.
std::string format_time(double time) {
  constexpr double kTooLong = 1e9;
  if (!(time >= 0 && time < kTooLong)) return "?";
  const auto whole = static_cast<long>(time);
  if (whole < 3600) return formatted("%02ld:%02ld", whole / 60, whole % 60);
  return formatted("%ld:%02ld:%02ld", whole / 3600, whole / 60 % 60, whole % 60);
}

std::string format_rate(double rate) {
  if (!(rate > 0) || !std::isfinite(rate)) return "?";
  return rate >= 100 ? formatted("%.0f", rate) : formatted("%.3g", rate);
}

std::string draw_bar(double fraction, int width, bool ascii) {
  static constexpr std::array<const char*, 8> kEighths = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int parts = ascii ? 1 : 8;
  const int filled = static_cast<int>(fraction * width * parts);
  std::string bar;
  for (int i = 0; i < filled / parts; ++i) bar += ascii ? "#" : "█";
  bar += kEighths[static_cast<size_t>(filled % parts)];
  return bar + std::string(static_cast<size_t>(width - terminal_text::columns(bar)), ' ');
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    if (const auto value = environment::text(name)) {
      const std::string locale = lower_case(*value);
      return locale.find("utf-8") != std::string::npos || locale.find("utf8") != std::string::npos;
    }
  }
  return false;
}

int terminal_width(int fd) {
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kDefaultWidth;
  return size.ws_col;
}

}  // namespace

std::string format_progress(const ProgressState& state, int width) {
  const bool known = state.total > 0 && state.done >= 0 && state.done <= state.total;
  const double fraction = known ? static_cast<double>(state.done) / static_cast<double>(state.total) : 0;

  const std::string description =
      state.description.empty() ? "" : without_control_characters(state.description) + ": ";
  const std::string percent = known ? formatted("%3d%%", static_cast<int>(fraction * 100)) : "";
  const std::string unit = without_control_characters(state.unit);
  std::string timing = "[" + format_time(state.elapsed);
  if (known) {
    const double left = state.rate > 0 ? static_cast<double>(state.total - state.done) / state.rate : -1;
    timing += "<" + format_time(state.done == state.total ? 0 : left);
  }
  const std::string rate_unit = state.rate_unit.empty() ? unit : without_control_characters(state.rate_unit);
  timing += ", " + format_rate(state.rate * state.rate_scale) + " " + rate_unit + "/s";
  std::string postfix;
  if (state.waiting && std::isfinite(*state.waiting)) {
    postfix += formatted(", %.0f%% waiting for data", 100 * std::clamp(*state.waiting, 0.0, 1.0));
  }
  if (!state.postfix.empty()) postfix += ", " + without_control_characters(state.postfix);
  const std::string count = known ? std::to_string(state.done) + "/" + std::to_string(state.total)
                                  : std::to_string(state.done) + " " + unit;

  const std::string tail = count + " " + timing;
  const std::string head = known ? percent + " " : "";
  const std::string full = description + head + tail + postfix + "]";
  if (width <= 0) return full;
  if (known) {
    // "45%| tail" is as wide as the text without bar plus the two rules; a blank follows the second.
    const int bar = width - terminal_text::columns(full) - 2;
    if (bar >= kShortestBar) {
      return description + percent + "|" + draw_bar(fraction, bar, state.ascii) + "| " + tail + postfix + "]";
    }
  }
  for (const std::string& shorter : {full, description + head + tail + "]", head + tail + "]"}) {
    if (terminal_text::columns(shorter) <= width) return shorter;
  }
  return terminal_text::cut(head + tail + "]", width);
}

ProgressBar::ProgressBar(int64_t total, std::string description, ProgressBarOptions options)
    : options_(std::move(options)) {
  TORCH_CHECK_VALUE(total >= 0, "ProgressBar: total is ", total, "; give 0 when it is not known");
  const bool is_terminal = ::isatty(options_.fd) == 1;
  // One that knows no escape sequences: an editor's, say.
  const bool is_dumb = environment::text("TERM") == "dumb";
  // Behind a launcher's pipe: it forwards redraws to its terminal and says how wide that is.
  const auto launcher_columns =
      is_terminal ? std::nullopt : environment::integer("LOCKSTEP_TERMINAL_COLUMNS", 1, 100'000);
  terminal_ = options_.terminal.value_or(!is_dumb && (is_terminal || launcher_columns.has_value()));
  if (!options_.width && launcher_columns) options_.width = static_cast<int>(*launcher_columns);
  state_.total = total;
  state_.description = std::move(description);
  state_.unit = options_.unit;
  state_.rate_unit = options_.rate_unit;
  state_.rate_scale = options_.rate_scale;
  state_.ascii = options_.ascii.value_or(!locale_is_utf8());
  start_ = drawn_ = options_.clock();
  if (options_.waited) waited_before_ = options_.waited();
  if (terminal_ && !options_.quiet) draw(start_);
}

ProgressBar::~ProgressBar() {
  finish();
}

void ProgressBar::update(int64_t count) {
  if (finished_) return;
  state_.done += count;
  if (options_.quiet) return;
  const Time now = options_.clock();
  if (!draw_is_due(now)) return;
  measure(now);
  draw(now);
}

bool ProgressBar::draw_is_due(Time now) const {
  const auto since = now - drawn_;
  if (terminal_) return since >= kRedrawInterval;
  if (since >= kHeartbeatInterval) return true;
  // The last one is finish()'s.
  if (state_.total == 0 || state_.done == state_.total || since < kLineInterval) return false;
  // In doubles, since a total near 2^63 must not overflow.
  const double line = static_cast<double>(state_.total) / kLines;
  return std::floor(static_cast<double>(state_.done) / line) >
         std::floor(static_cast<double>(drawn_done_) / line);
}

void ProgressBar::measure(Time now) {
  const double interval = seconds(now - drawn_);
  if (interval <= 0) return;
  const double weight = smooth_seconds_ == 0 ? 1 : kSmoothing;  // the first interval is all that is known
  smooth_units_ += weight * (static_cast<double>(state_.done - drawn_done_) - smooth_units_);
  smooth_seconds_ += weight * (interval - smooth_seconds_);
  state_.rate = smooth_units_ / smooth_seconds_;
}

void ProgressBar::draw(Time now, bool last) {
  state_.elapsed = seconds(now - start_);
  if (options_.waited && state_.elapsed > 0) {
    state_.waiting = (options_.waited() - waited_before_) / state_.elapsed;
  }
  state_.postfix.clear();
  for (const auto& [key, value] : postfix_) {
    if (!state_.postfix.empty()) state_.postfix += ", ";
    state_.postfix += key;
    state_.postfix += '=';
    state_.postfix += value;
  }
  drawn_ = now;
  drawn_done_ = state_.done;
  if (!terminal_) {
    observe::internal::write_above_terminal_line(options_.fd,
                                                 format_progress(state_, options_.width.value_or(0)) + "\n");
    return;
  }
  // The last column stays free: many terminals wrap as soon as it is written.
  const int width =
      std::max(options_.width.value_or(0) > 0 ? *options_.width : terminal_width(options_.fd), 2);
  const std::string line = format_progress(state_, width - 1);
  last ? observe::internal::end_terminal_line(options_.fd, line)
       : observe::internal::draw_terminal_line(options_.fd, line);
}

void ProgressBar::write(std::string_view line) {
  if (!options_.quiet) observe::internal::write_above_terminal_line(options_.fd, std::string(line) + "\n");
}

void ProgressBar::set_postfix(std::string_view key, double value) {
  set_postfix(key, formatted("%.4g", value));
}

void ProgressBar::set_postfix(std::string_view key, std::string_view value) {
  if (finished_ || options_.quiet) return;
  auto known =
      std::find_if(postfix_.begin(), postfix_.end(), [&](const auto& entry) { return entry.first == key; });
  if (known != postfix_.end()) {
    known->second = value;
  } else {
    postfix_.emplace_back(key, value);
  }
}

void ProgressBar::finish() noexcept {
  if (finished_) return;
  finished_ = true;
  if (options_.quiet) return;
  try {
    const Time now = options_.clock();
    const double elapsed = seconds(now - start_);
    state_.rate = elapsed > 0 ? static_cast<double>(state_.done) / elapsed : 0;
    draw(now, /*last=*/true);
  } catch (...) {  // NOLINT(bugprone-empty-catch): memory or the caller's clock: no reason to end a run
  }
}

}  // namespace lockstep
