#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/base/files/append_file.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/agent/filtered_copy.h>
#include <lockstep/launch/agent/line_forwarder.h>
#include <lockstep/launch/signal_catcher.h>
#include <lockstep/launch/supervisor.h>

namespace lockstep::launch {

/// Carries what the workers write to their standard output and error to those of the launcher, line by line
/// with the ranks' marks. Where both of the launcher's are the same terminal, file or pipe, they are served
/// as one, so that rows of the two do not mix either.
///
/// It never blocks the supervisor: it writes only what there is room for, and stops reading from workers while a
/// slow reader of its output has not caught up (the workers then wait, as they would without a launcher). When
/// that reader is gone, output is thrown away and the workers go on. To terminals and pipes it writes through open files of
/// its own, which do not block: poll(2) promises a terminal room for one byte, and another process may fill a pipe first.
class OutputRouter : public Streams {
 public:
  struct Options {
    int nprocs = 1;
    int first_rank = 0;  // that of local rank 0, for the marks
    bool prefix = true;  // "[rank N] "; without it and with one worker only, bytes pass as they come
    std::array<int, 2> targets = {1, 2};
    std::function<void(int, int, std::string_view)> observe = {};  // see RunOptions::observe_output
  };
  /// Where one stream of a worker goes.
  struct Route {
    std::string file = {};  // as it comes; empty: to no file. What the disk refuses is lost, and said once
    bool shown = true;      // to the target
    FilteredCopy* copy = nullptr;
  };
  explicit OutputRouter(const Options& options);

  /// Makes the pipes of the next local rank; the ends that become its standard output and error. To be closed
  /// by the caller once the worker runs.
  std::array<UniqueFd, 2> open_next(const std::array<Route, 2>& routes);
  /// Writes a line of the launcher's own among those of the workers, to the target of their standard error.
  void say(const std::string& line);
  /// The last lines that this local rank wrote to its standard error.
  std::vector<std::string> last_lines(int local_rank) const {
    return tails_.at(static_cast<size_t>(local_rank)).lines();
  }
  /// How wide a line of a worker may be on the terminal behind its standard error; 0 when that is no
  /// terminal.
  size_t worker_columns() const;
  /// After the last worker: reads the rest, and ends unfinished lines.
  void close();
  /// After close(): queues text of the launcher's own, as it stands, for its standard error, which need not be a target.
  void append(std::string_view text);
  /// After close(), of workers that are reaped: writes what is queued, and waits for a slow reader. From a signal on, or where
  /// `interrupted`, or from when `urgent` is readable, it waits no longer than Supervisor::kDrainTime, and after a second signal
  /// not at all; the rest is lost. The first signal, if one came. Reaps orphans meanwhile.
  std::optional<int> drain(const SignalCatcher& signals, bool interrupted, int urgent = -1);

  void add_to(std::vector<pollfd>& waits) override;
  void serve(const pollfd* begin, const pollfd* end) override;
  Deadline wake_at() const override;
  bool finished() const override;

 private:
  struct Sink {
    UniqueFd own;  // empty where there is only the target itself
    int fd = -1;
    bool terminal = false;
    bool broken = false;
    LineForwarder lines;
    size_t own_index = 0;  // of the launcher's lines in `lines`
    std::string queue;
    size_t sent = 0;  // bytes of the queue that are already written

    void write_some();
    void write_once();
  };
  struct Source {
    UniqueFd fd;
    size_t sink = 0;
    size_t index = 0;  // in the sink's LineForwarder
    int local_rank = 0;
    int stream = 1;  // 1: standard output, 2: standard error
    bool shown = true;
    std::optional<AppendFile> file = {};
    FilteredCopy* copy = nullptr;
    LineTail* tail = nullptr;              // of standard error
    Deadline idle_at = Deadline::never();  // when its unfinished line is written
  };

  void add_sink(int target, std::vector<std::string> prefixes);
  void read_from(Source& source);

  Options options_;
  // One or two of the targets, and this process's standard error where that is none of them.
  std::vector<std::unique_ptr<Sink>> sinks_;
  size_t error_sink_ = 0;  // of the workers' standard error
  std::vector<Source> sources_;
  std::vector<LineTail> tails_;
};

}  // namespace lockstep::launch
