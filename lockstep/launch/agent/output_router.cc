#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <limits.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/files/nonblocking.h>
#include <lockstep/base/log.h>
#include <lockstep/base/text/rank_mark.h>
#include <lockstep/launch/agent/orphan_watch.h>
#include <lockstep/launch/agent/output_router.h>

namespace lockstep::launch {
namespace {

constexpr std::chrono::milliseconds kIdleTime{200};  // after which a terminal shows an unfinished line
constexpr size_t kFullQueue = 1 << 20;               // bytes; from here on the workers wait for a slow reader

size_t terminal_columns(int fd) {
  winsize size = {};
  if (::isatty(fd) == 0) return 0;
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool same_place(int a, int b) {
  struct stat first = {};
  struct stat second = {};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

std::string prefix_of(int rank, bool wanted) {
  return wanted ? rank_mark(rank) : std::string();
}

}  // namespace

OutputRouter::OutputRouter(const Options& options)
    : options_(options), tails_(static_cast<size_t>(options.nprocs)) {
  const bool merged = same_place(options.targets[0], options.targets[1]);
  for (size_t i = 0; i < (merged ? 1 : 2); ++i) {
    const int target = options.targets[merged ? 1 : i];
    std::vector<std::string> prefixes;
    for (int rank = 0; rank < options.nprocs; ++rank) {
      prefixes.insert(prefixes.end(), merged ? 2 : 1, prefix_of(options.first_rank + rank, options.prefix));
    }
    add_sink(target, std::move(prefixes));
  }
  error_sink_ = sinks_.size() - 1;
  if (!same_place(options.targets[1], STDERR_FILENO)) add_sink(STDERR_FILENO, {});
  sources_.reserve(static_cast<size_t>(options.nprocs) * 2);
}

void OutputRouter::add_sink(int target, std::vector<std::string> prefixes) {
  prefixes.emplace_back("lockstep run: ");
  const size_t own = prefixes.size() - 1;
  const size_t columns = terminal_columns(target);
  UniqueFd nonblocking = reopen_nonblocking(target);
  const int fd = nonblocking ? nonblocking.get() : target;
  sinks_.push_back(std::make_unique<Sink>(Sink{std::move(nonblocking),
                                               fd,
                                               columns > 0,
                                               false,
                                               LineForwarder(std::move(prefixes), columns),
                                               own,
                                               {},
                                               0}));
}

std::array<UniqueFd, 2> OutputRouter::open_next(const std::array<Route, 2>& routes) {
  std::array<UniqueFd, 2> write_ends;
  const size_t local_rank = sources_.size() / 2;
  const bool merged = error_sink_ == 0;
  for (size_t stream = 0; stream < 2; ++stream) {
    int ends[2] = {-1, -1};
    TORCH_CHECK_WITH(DistBackendError, ::pipe2(ends, O_CLOEXEC) == 0,
                     "can't make a pipe: ", std::strerror(errno),
                     errno == EMFILE ? "; raise the limit on open files (ulimit -n)" : "");
    Source source;
    source.fd.reset(ends[0]);
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);  // ours only: the worker's end keeps blocking
    write_ends[stream].reset(ends[1]);
    source.sink = merged ? 0 : stream;
    source.index = merged ? local_rank * 2 + stream : local_rank;
    source.local_rank = static_cast<int>(local_rank);
    source.stream = static_cast<int>(stream) + 1;
    source.shown = routes[stream].shown;
    source.copy = routes[stream].copy;
    if (!routes[stream].file.empty()) {
      source.file.emplace("lockstep run", routes[stream].file, AppendFile::Kind::kBinary);
      source.file->open();  // where the worker writes nothing, it is empty
    }
    source.tail = stream == 1 ? &tails_.at(local_rank) : nullptr;
    sources_.push_back(std::move(source));
  }
  return write_ends;
}

void OutputRouter::say(const std::string& line) {
  Sink& sink = *sinks_[error_sink_];
  sink.queue += sink.lines.feed(sink.own_index, line + "\n");
}

size_t OutputRouter::worker_columns() const {
  const size_t columns = terminal_columns(options_.targets[1]);
  const size_t prefix = prefix_of(options_.first_rank + options_.nprocs - 1, options_.prefix).size();
  return columns > prefix ? columns - prefix : 0;
}

void OutputRouter::add_to(std::vector<pollfd>& waits) {
  for (const Source& source : sources_) {
    // A negative descriptor is skipped by poll(2) and keeps the entries in step with the sources.
    const bool wanted =
        source.fd &&
        (!source.shown || sinks_[source.sink]->queue.size() - sinks_[source.sink]->sent < kFullQueue);
    waits.push_back({wanted ? source.fd.get() : -1, POLLIN, 0});
  }
  for (const auto& sink : sinks_) waits.push_back({sink->queue.empty() ? -1 : sink->fd, POLLOUT, 0});
}

void OutputRouter::serve(const pollfd* begin, const pollfd* end) {
  TORCH_INTERNAL_ASSERT(static_cast<size_t>(end - begin) == sources_.size() + sinks_.size());
  for (const auto& sink : sinks_) {
    if (sink->terminal) sink->lines.set_columns(std::max<size_t>(terminal_columns(sink->fd), 1));
  }
  for (size_t i = 0; i < sources_.size(); ++i) {
    Source& source = sources_[i];
    const bool asked = begin[i].fd >= 0;
    const bool idle = source.idle_at.expired();
    // What has come since poll(2) belongs to an unfinished line.
    if (asked && (begin[i].revents != 0 || idle)) read_from(source);
    if (!idle || !source.idle_at.expired()) continue;
    if (!asked) {  // it may have written the rest, and the sink has no room for it
      source.idle_at = Deadline::after(kIdleTime);
      continue;
    }
    source.idle_at = Deadline::never();
    sinks_[source.sink]->queue += sinks_[source.sink]->lines.flush(source.index);
  }
  for (size_t i = 0; i < sinks_.size(); ++i) {
    if (begin[sources_.size() + i].revents != 0) sinks_[i]->write_some();
  }
}

void OutputRouter::read_from(Source& source) {
  char buffer[64 * 1024];
  const ssize_t got = ::read(source.fd.get(), buffer, sizeof(buffer));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  Sink& sink = *sinks_[source.sink];
  if (got <= 0) {
    source.fd.reset();
    source.idle_at = Deadline::never();
    sink.queue += sink.lines.finish(source.index);
    if (source.copy != nullptr) source.copy->finish(source.local_rank);
    return;
  }
  const std::string_view bytes(buffer, static_cast<size_t>(got));
  if (source.tail != nullptr) source.tail->feed(bytes);
  if (options_.observe) options_.observe(source.local_rank, source.stream, bytes);
  if (source.file) source.file->append(bytes);
  if (source.copy != nullptr) source.copy->feed(source.local_rank, bytes);
  if (!source.shown) return;
  if (!options_.prefix && options_.nprocs == 1) {
    sink.queue += bytes;
    return;
  }
  sink.queue += sink.lines.feed(source.index, bytes);
  // Where no terminal shows it, as in a file, another rank would end its row, and tear what a program reads there.
  source.idle_at =
      sink.terminal && sink.lines.holds_back(source.index) ? Deadline::after(kIdleTime) : Deadline::never();
}

void OutputRouter::Sink::write_some() {
  constexpr int kTurns = 32;  // then others' output is read again
  pollfd room = {fd, POLLOUT, 0};
  for (int turn = 0; turn < kTurns && !queue.empty(); ++turn) {
    if (turn > 0 && (::poll(&room, 1, 0) != 1 || (room.revents & POLLOUT) == 0)) return;
    write_once();
  }
}

void OutputRouter::Sink::write_once() {
  // poll(2) promises room for this much in a pipe; more could block.
  const size_t size = queue.size() - sent;
  const ssize_t written = broken ? static_cast<ssize_t>(size)
                                 : ::write(fd, queue.data() + sent, std::min<size_t>(size, PIPE_BUF));
  if (written >= 0) {
    sent += static_cast<size_t>(written);
    if (sent == queue.size() || sent > kFullQueue) queue.erase(0, std::exchange(sent, 0));
  } else if (errno != EINTR && errno != EAGAIN) {
    broken = true;
    LOCKSTEP_LOG(kWarning) << "the workers' output can no longer be written (" << std::strerror(errno)
                           << "); it is thrown away from here on";
    queue.clear();
    sent = 0;
  }
}

Deadline OutputRouter::wake_at() const {
  Deadline soonest = Deadline::never();
  for (const Source& source : sources_) {
    if (source.idle_at.remaining() < soonest.remaining()) soonest = source.idle_at;
  }
  return soonest;
}

bool OutputRouter::finished() const {
  return std::none_of(sources_.begin(), sources_.end(),
                      [](const Source& source) { return static_cast<bool>(source.fd); });
}

void OutputRouter::close() {
  for (Source& source : sources_) {
    Sink& sink = *sinks_[source.sink];
    if (source.fd) {
      read_from(source);  // what a killed leftover wrote last
      sink.queue += sink.lines.finish(source.index);
      if (source.copy != nullptr) source.copy->finish(source.local_rank);
      source.fd.reset();
    }
  }
}

void OutputRouter::append(std::string_view text) {
  sinks_.back()->queue += text;
}

std::optional<int> OutputRouter::drain(const SignalCatcher& signals, bool interrupted, int urgent) {
  Deadline until = interrupted ? Deadline::after(Supervisor::kDrainTime) : Deadline::never();
  std::optional<int> first;
  OrphanWatch orphans;
  while (true) {
    std::vector<pollfd> waits{{signals.fd(), POLLIN, 0}, {until.is_never() ? urgent : -1, POLLIN, 0}};
    bool queued = false;
    for (const auto& sink : sinks_) {
      queued = queued || !sink->queue.empty();
      waits.push_back({sink->queue.empty() ? -1 : sink->fd, POLLOUT, 0});
    }
    if (!queued || until.expired()) return first;
    const Deadline wake_at = earlier(until, orphans.wake_at());
    if (::poll(waits.data(), waits.size(), wake_at.poll_milliseconds()) < 0) continue;
    orphans.look({});
    while (const auto signal = signals.take()) {
      if (*signal == SIGUSR2) continue;  // it asks workers for profiles
      const bool again = interrupted || first;
      if (!first) first = signal;
      if (again) return first;
    }
    if (first || waits[1].revents != 0) until = earlier(until, Deadline::after(Supervisor::kDrainTime));
    for (size_t i = 0; i < sinks_.size(); ++i) {
      if (waits[i + 2].revents != 0) sinks_[i]->write_some();
    }
  }
}

}  // namespace lockstep::launch
