#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unistd.h>
#include <utility>
#include <vector>

namespace lockstep {

/// What a progress bar shows at one moment.
struct ProgressState {
  std::string description = {};
  int64_t done = 0;
  int64_t total = 0;   ///< 0: not known
  double elapsed = 0;  ///< seconds
  double rate = 0;     ///< units per second; 0: not known
  /// What is shown as the rate is so many times `rate`, in `rate_unit`.
  double rate_scale = 1;
  /// Share of the elapsed time that was spent waiting for data, 0 to 1; shown where it is known.
  std::optional<double> waiting = std::nullopt;
  std::string unit = "it";
  std::string rate_unit = {};  ///< empty: `unit`
  std::string postfix = {};    ///< "loss=0.31, accuracy=0.87"
  bool ascii = false;          ///< draw with '#' instead of block characters
};

/// One line for `state`, without control characters and at most `width` columns wide (a code point counts as
/// one):
///
///     epoch 1:  45%|█████▍      | 27000/60000 [00:12<00:15, 2250 images/s, loss=0.31]
///     epoch 1: 27000 images [00:12, 2250 images/s, loss=0.31]         (total 0, or passed)
///     epoch 1:  45% 27000/60000 [00:12<00:15, 2250 images/s, 3% waiting for data, loss=0.31]
///
/// Where that is too wide, the bar shrinks, then goes, then postfix and waiting, then the description; then
/// the line is cut. `width` 0: no limit and no bar, for a log. A pure function.
std::string format_progress(const ProgressState& state, int width);

struct ProgressBarOptions {
  std::string unit = "it";
  /// What the rate shows, if not units of this rank: samples of all ranks while batches are counted, say, are
  /// `.unit = "batches", .rate_unit = "samples", .rate_scale = batch_size * world_size`.
  std::string rate_unit = {};
  double rate_scale = 1;
  /// Draw nothing: for all ranks but one.
  bool quiet = false;
  int fd = STDERR_FILENO;  ///< not owned
  /// Whether to redraw one line or to write separate lines; isatty(fd) unless told.
  std::optional<bool> terminal = std::nullopt;
  /// Columns; the terminal's at each redraw unless told.
  std::optional<int> width = std::nullopt;
  /// '#' instead of block characters; by the locale's variables (LC_ALL, LC_CTYPE, LANG) unless told.
  std::optional<bool> ascii = std::nullopt;
  /// Seconds that were spent waiting for data so far, since any point in time; asked at the start and at each
  /// redraw, and their share of the elapsed time is shown. Called until finish(). Of a loader:
  /// `.waited = [&loader] { return loader.waited(); }`
  std::function<double()> waited = {};
  std::function<std::chrono::steady_clock::time_point()> clock = &std::chrono::steady_clock::now;
};

/// A progress bar on standard error, after Python's tqdm.
///
///     ProgressBar bar(train.size(), "epoch 1", {.unit = "images", .quiet = rank != 0});
///     for (auto& batch : loader) {
///       …
///       bar.set_postfix("loss", loss);
///       bar.update(batch.data.size(0));
///     }                                         // finished by its destructor
///
/// On a terminal it redraws its line, at most every 100 ms. Elsewhere (a file, a pipe, TERM=dumb) it writes a
/// line at every tenth of the total, but not within a second of the last, and at least one a minute; and
/// always the final one. An update costs one look at the clock between redraws, some 30 ns. Write errors are
/// ignored: a progress bar stops no training. Not thread-safe.
///
/// Lockstep's log lines, from any thread, stand above the bar and leave it whole, and so does what write()
/// gets. Other output (std::cout) lands after the bar in its line, which the next redraw begins anew.
class ProgressBar {
 public:
  /// `total`: how many units there will be, 0 if that is not known. Throws c10::ValueError when it is
  /// negative.
  explicit ProgressBar(int64_t total, std::string description = "", ProgressBarOptions options = {});
  /// finish().
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// `count` more units are done.
  void update(int64_t count = 1);
  /// Shows "key=value" after the rate from the next redraw on; a known key gets the new value in its old
  /// place. Numbers are shown with four significant digits.
  void set_postfix(std::string_view key, double value);
  void set_postfix(std::string_view key, std::string_view value);
  /// Writes a line of the program's own above the bar, as tqdm.write(); in a log just the line. Does nothing
  /// when the bar is quiet, so that rank 0 alone writes; works after finish(), too.
  void write(std::string_view line);
  /// Draws the final state, with the rate over the whole time, and ends the line. Later calls of any method
  /// do nothing.
  void finish() noexcept;

  int64_t done() const { return state_.done; }

 private:
  using Time = std::chrono::steady_clock::time_point;

  bool draw_is_due(Time now) const;
  void measure(Time now);
  void draw(Time now, bool last = false);

  ProgressBarOptions options_;
  bool terminal_ = false;
  bool finished_ = false;
  ProgressState state_;
  std::vector<std::pair<std::string, std::string>> postfix_;
  double waited_before_ = 0;  // what options_.waited said at the start
  Time start_;
  Time drawn_;              // when the last line was drawn; start_ before the first
  int64_t drawn_done_ = 0;  // what it showed as done
  // Exponential averages of units and seconds between two draws, whose quotient is the rate.
  double smooth_units_ = 0;
  double smooth_seconds_ = 0;
};

}  // namespace lockstep
