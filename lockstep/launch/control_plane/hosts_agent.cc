#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <net/if.h>
#include <poll.h>
#include <string_view>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/files/nonblocking.h>
#include <lockstep/base/files/read_at_most.h>
#include <lockstep/base/host_name.h>
#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/standard_streams.h>
#include <lockstep/base/random_bytes.h>
#include <lockstep/base/text/hex.h>
#include <lockstep/launch/agent/orphan_watch.h>
#include <lockstep/launch/agent/worker_group.h>
#include <lockstep/launch/control_plane/control_plane.h>
#include <lockstep/launch/control_plane/hosts_agent.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/signal_catcher.h>
#include <lockstep/launch/supervisor.h>
#include <lockstep/launch/worker_process.h>
#include <lockstep/rendezvous/network/network_interface.h>

namespace lockstep::launch {
namespace {

constexpr size_t kLeastSecretBytes = 32;
constexpr size_t kMostSecretBytes = 16384;

/// Writes the agent's own lines on a thread of its own: a terminal that is stopped, or a pipe without room, must keep
/// neither the coordinator's answers from the other hosts, which would end their workers, nor signals from this one.
class LineWriter {
 public:
  LineWriter() {
    thread_.start("lockstep-lines", [this] { run(); });
  }
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;
  /// Once all is written, or kDrainTime later.
  ~LineWriter() {
    {
      std::unique_lock lock(mutex_);
      enter(Phase::kEnding);
      const bool written =
          changed_.wait_for(lock, Supervisor::kDrainTime, [this] { return phase_ == Phase::kEnded; });
      if (!written) enter(Phase::kAbandoning);
    }
    thread_.join();
  }

  /// Thread-safe; does not block. What is more than kMost waiting lines is dropped.
  void say(const std::string& text) {
    constexpr size_t kMost = 1000;
    const std::lock_guard lock(mutex_);
    if (lines_.size() < kMost) lines_.push_back("lockstep run: " + text + (text.ends_with('\n') ? "" : "\n"));
    changed_.notify_all();
  }

 private:
  /// In the order in which they follow each other; kAbandoning is mostly left out.
  enum class Phase : uint8_t {
    kRunning,
    kEnding,      // what waits is written
    kAbandoning,  // there was no room for it in time: it is dropped
    kEnded,       // the thread writes nothing any more
  };

  /// The one place where the phase changes, which never goes back. With the mutex held.
  void enter(Phase next) {
    TORCH_INTERNAL_ASSERT(next > phase_);
    phase_ = next;
    changed_.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return phase_ != Phase::kRunning || !lines_.empty(); });
      if (lines_.empty()) break;
      const std::string text = std::move(lines_.front());
      lines_.pop_front();
      lock.unlock();
      write(text);
      lock.lock();
    }
    enter(Phase::kEnded);
  }

  void write(std::string_view text) {
    const int fd = nonblocking_ ? nonblocking_.get() : STDERR_FILENO;
    while (!text.empty() && phase_ != Phase::kAbandoning) {
      const ssize_t written = ::write(fd, text.data(), text.size());
      if (written > 0) {
        text.remove_prefix(static_cast<size_t>(written));
      } else if (errno == EAGAIN) {
        pollfd room = {fd, POLLOUT, 0};
        ::poll(&room, 1, 100);
      } else if (errno != EINTR) {
        return;
      }
    }
  }

  const UniqueFd nonblocking_ = reopen_nonblocking(STDERR_FILENO);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::string> lines_;
  std::atomic<Phase> phase_{Phase::kRunning};  // changed with mutex_ held, and read by write() without
  BackgroundThread thread_;
};

/// The next signal that ends the job here. SIGUSR2 asks workers for profiles, which is the supervisor's.
std::optional<int> take_ending(const SignalCatcher& signals) {
  auto signal = signals.take();
  while (signal == SIGUSR2) signal = signals.take();
  return signal;
}

/// The coordinator's word, while workers run.
class HostControl : public WorkerControl {
 public:
  HostControl(ControlPlane& plane, const SignalCatcher& signals, std::chrono::nanoseconds grace_period,
              std::shared_ptr<ExitStatusTable> table)
      : plane_(plane), signals_(signals), grace_period_(grace_period), table_(std::move(table)) {}

  std::shared_ptr<ExitStatusTable> exit_status() const override { return table_; }
  int fd() const override { return plane_.fd(); }
  void serve(Supervisor& supervisor) override {
    while (const auto signal = take_ending(signals_)) {
      plane_.leave(*signal);
      if (leaving_ == 0) leaving_ = *signal;
      // One that came before the supervisor began to take signals.
      if (!supervisor.interrupted()) supervisor.stop(grace_period_);
    }
    while (const auto task = plane_.take()) {
      if (task->kind == ControlPlane::Task::Kind::kEnd) end_ = task;
      supervisor.stop(task->kind == ControlPlane::Task::Kind::kStop ? grace_period_
                                                                    : std::chrono::nanoseconds(0));
    }
  }
  bool has_lapsed() override { return plane_.has_lapsed(); }
  void ended(const GroupEnd& end) override {
    if (!end_) plane_.workers_ended(end.exit_status, end.report, end.far_culprit.value_or(-1));
  }
  /// The thread has failed, and the job ends with these workers.
  const std::optional<ControlPlane::Task>& end() const { return end_; }
  /// The first signal that has come while workers ran; 0: none.
  int leaving() const { return leaving_; }

 private:
  ControlPlane& plane_;
  const SignalCatcher& signals_;
  std::chrono::nanoseconds grace_period_;
  std::shared_ptr<ExitStatusTable> table_;
  std::optional<ControlPlane::Task> end_;
  int leaving_ = 0;
};

/// --local-addr as workers take it: the address of a name, or an interface.
std::string checked_local_address(const std::string& given) {
  std::string why;
  const auto addresses = given.empty() ? std::vector<SocketAddress>() : addresses_of(given, 0, why);
  if (!addresses.empty()) return addresses.front().text();
  TORCH_CHECK_VALUE(given.empty() || ::if_nametoindex(given.c_str()) != 0, "--local-addr is '", given,
                    "', which is no address and no interface of this host: ", why);
  return given;
}

void run_generation(const HostsOptions& options, const std::string& local_address,
                    const ControlPlane::Task& task, ControlPlane& plane, HostControl& control,
                    WorkerForks& forks, LineWriter& lines) {
  const Place& place = task.place;
  const RankVariables variables = {.nprocs = options.run.nprocs,
                                   .first_rank = place.first_rank,
                                   .world_size = place.world_size,
                                   .first_role_rank = place.first_role_rank,
                                   .role_world_size = place.role_world_size,
                                   .group_rank = place.group_rank,
                                   .group_size = place.group_size,
                                   .store_host = task.store_host,
                                   .run_id = options.job_id,
                                   .role = options.run.role,
                                   .restart_count = static_cast<int>(place.generation) - 1,
                                   .max_restarts = options.membership.max_restarts};
  const bool has_wish = read_interface_wish(environment::text).has_value();
  const auto adjust = [&](WorkerEnvironment& environment) {
    // The meeting point is on loopback, which says nothing of the interface between hosts.
    const std::string& own = local_address.empty() ? task.local_address : local_address;
    if (!has_wish && !own.empty()) environment.set("LOCKSTEP_SOCKET_IFNAME", own);
    if (options.membership.max_hosts > 1)
      environment.set("LOCKSTEP_AGENT_PORT", std::to_string(options.endpoint_port));
  };
  try {
    run_workers(
        options.run, variables,
        [&](Supervisor& supervisor) {
          plane.guard(supervisor.lease());
          return task.store_port;
        },
        adjust, &control, &forks);
  } catch (const std::exception&) {
    const std::string why = text_of(std::current_exception());
    lines.say(why);
    control.ended({.exit_status = 1, .report = why});
  }
}

/// Waits until the coordinator's name has an address: it may get one when that host starts, or, a pod of
/// Kubernetes, has started. The signal that ended the wait;
/// otherwise there is an address, or the time for it is over.
std::optional<int> await_name(const HostsOptions& options, const SignalCatcher& signals, OrphanWatch& orphans,
                              LineWriter& lines) {
  const BootTime until = BootClock::now() + options.membership.join_timeout;
  bool said = false;
  std::string why;
  while (addresses_of(options.endpoint_host, options.endpoint_port, why).empty() &&
         BootClock::now() < until) {
    if (!std::exchange(said, true)) lines.say("can't find the coordinator's host, and tries again: " + why);
    pollfd wait = {signals.fd(), POLLIN, 0};
    ::poll(&wait, 1, 1000);
    orphans.look({});
    if (const auto signal = take_ending(signals)) return signal;
  }
  return std::nullopt;
}

}  // namespace

std::string read_secret(const std::string& file) {
  std::string secret;
  if (file.empty()) {
    secret = environment::text("LOCKSTEP_JOB_SECRET").value_or("");
  } else {
    const auto text = read_at_most(file, kMostSecretBytes + 1);
    TORCH_CHECK_VALUE(text, "can't read the secret in ", file, ": ", std::strerror(errno));
    secret = *text;
    TORCH_CHECK_VALUE(!secret.empty(), "the file of the secret, ", file, ", is empty");
    TORCH_CHECK_VALUE(secret.size() <= kMostSecretBytes, "the file of the secret, ", file, ", has more than ",
                      kMostSecretBytes, " bytes; make one: (umask 077; lockstep secret > FILE)");
  }
  const auto is_space = [](char letter) { return std::isspace(static_cast<unsigned char>(letter)) != 0; };
  while (!secret.empty() && is_space(secret.back())) secret.pop_back();
  secret.erase(secret.begin(), std::find_if_not(secret.begin(), secret.end(), is_space));
  TORCH_CHECK_VALUE(secret.empty() || secret.size() >= kLeastSecretBytes, "the job's secret has ",
                    secret.size(),
                    " characters; make one of 64 that can't be guessed: (umask 077; lockstep secret > FILE)");
  return secret;
}

std::string make_secret() {
  return to_hex(random_bytes<32>());
}

int run_on_hosts(HostsOptions options) {
  options.run = checked_options(std::move(options.run));
  const auto objection = objection_to(options.membership);
  TORCH_CHECK_VALUE(!objection, *objection);
  open_standard_streams();
  LineWriter lines;
  if (options.secret.empty()) {
    lines.say(
        "WARNING: there is no secret, so any process that reaches the coordinator's port can take part in "
        "this job "
        "and change it; make one by `(umask 077; lockstep secret > FILE)`, and give it on all hosts by "
        "--secret-file "
        "FILE");
  }
  options.membership.reaction_time =
      std::min<std::chrono::nanoseconds>(Supervisor::kReactionTime, options.run.grace_period);
  raise_open_files_limit();  // the coordinator has three for each connection that a far worker has to the store
  const std::string local_address = checked_local_address(options.local_address);
  const SignalCatcher signals;
  OrphanWatch orphans;  // while no workers run
  if (const auto signal = await_name(options, signals, orphans, lines)) return 128 + *signal;
  const auto table = std::make_shared<ExitStatusTable>(ExitStatusTable::create(options.run.nprocs));
  ControlPlane plane(
      {.membership = options.membership,
       .self = {.id = random_bytes<16>(),
                .host = host_name(),
                .node_rank = options.node_rank,
                .nproc = options.run.nprocs,
                .role = options.run.role},
       .endpoint = find_endpoint(options.endpoint_host, options.endpoint_port, options.coordinates),
       .key = TlsKey(options.secret, options.job_id),
       .tunnel = options.tunnel || options.membership.max_hosts == 1,
       // Over several hosts the agents meet at the port that the user names.
       .store_port = options.membership.max_hosts == 1 ? options.run.master_port : uint16_t{0},
       .say = [&lines](const std::string& text) { lines.say(text); },
       .table = table,
       .report = options.report});
  const MembershipOptions& membership = options.membership;
  WorkerForks forks(membership.max_restarts > 0 || membership.min_hosts < membership.max_hosts);
  int leaving = 0;  // the first signal that has come
  while (true) {
    pollfd waits[2] = {{signals.fd(), POLLIN, 0}, {plane.fd(), POLLIN, 0}};
    ::poll(waits, 2, orphans.wake_at().poll_milliseconds());
    orphans.look(forks.pids());
    while (const auto signal = take_ending(signals)) {
      plane.leave(*signal);
      if (leaving != 0) return 128 + *signal;  // no workers run
      leaving = *signal;
    }
    const auto task = plane.take();
    if (!task) continue;
    if (task->kind == ControlPlane::Task::Kind::kEnd) return task->exit_status;
    if (task->kind != ControlPlane::Task::Kind::kStart) continue;  // they have ended meanwhile
    if (leaving != 0) {                                            // it came after the decision to start
      plane.workers_ended(128 + leaving, "", -1);
      continue;
    }
    HostControl control(plane, signals, options.run.grace_period, table);
    run_generation(options, local_address, *task, plane, control, forks, lines);
    options.run.tells_of_threads = false;  // once, with this host's first workers
    if (control.end()) return control.end()->exit_status;
    leaving = control.leaving();
  }
}

}  // namespace lockstep::launch
