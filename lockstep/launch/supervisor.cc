#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <signal.h>
#include <string>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/log.h>
#include <lockstep/base/process/standard_streams.h>
#include <lockstep/launch/supervisor.h>

namespace lockstep::launch {
namespace {

int checked_count(int nprocs) {
  TORCH_CHECK_VALUE(nprocs >= 1, "the number of processes must be at least 1, not ", nprocs);
  return nprocs;
}

size_t open_descriptors() {
  std::error_code ignored;
  const std::filesystem::directory_iterator all("/proc/self/fd", ignored);
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

/// An end that has its cause outside of the job.
bool was_killed(const Ending& ending) {
  return !ending.asked_to_end && WIFSIGNALED(ending.wait_status) && WTERMSIG(ending.wait_status) != SIGABRT;
}

/// Whether the process has a handler for the signal, which might end it otherwise.
bool catches(pid_t pid, int signal) {
  constexpr const char* kCaught = "SigCgt:";
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string word; status >> word;) {
    uint64_t mask = 0;
    if (word == kCaught && status >> std::hex >> mask) return ((mask >> (signal - 1)) & 1) != 0;
  }
  return false;
}

}  // namespace

bool Ending::was_ended_by_sigkill() const {
  return !asked_to_end && WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGKILL;
}

Deadline earlier(Deadline a, Deadline b) {
  return a.remaining() <= b.remaining() ? a : b;
}

void prepare_descriptors(int nprocs, int log_files) {
  open_standard_streams();
  // The store's server, the guardian and what is open for a moment only; then for each worker its output, its
  // end and its connection to the store. c10d's store ends the process, or waits for minutes, where it gets
  // none.
  constexpr size_t kOwn = 28;
  const size_t per_worker = 4 + static_cast<size_t>(log_files);
  const size_t needed = open_descriptors() + kOwn + per_worker * static_cast<size_t>(checked_count(nprocs));
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  TORCH_CHECK_WITH(DistBackendError, false, "the limit on open files is ", limit.rlim_cur, ", and starting ",
                   nprocs, nprocs == 1 ? " process" : " processes", " takes up to ", needed,
                   "; raise it (ulimit -n ", needed, ")");
}

void order_simultaneous(std::vector<Ending>& endings) {
  auto rank_of = [](const Ending& ending) {
    if (!ending.failed()) return 2;
    return WIFSIGNALED(ending.wait_status) && WTERMSIG(ending.wait_status) != SIGABRT ? 0 : 1;
  };
  std::stable_sort(endings.begin(), endings.end(), [&](const Ending& a, const Ending& b) {
    return std::pair(rank_of(a), a.local_rank) < std::pair(rank_of(b), b.local_rank);
  });
}

int cause_of_failure(const std::vector<Ending>& endings, int local_rank) {
  int cause = local_rank;
  for (size_t step = 0; step < endings.size(); ++step) {
    const auto ending = std::find_if(endings.begin(), endings.end(),
                                     [&](const Ending& one) { return one.local_rank == cause; });
    if (ending == endings.end()) break;
    if (was_killed(*ending) || !ending->culprit) return cause;
    cause = *ending->culprit;
  }
  return local_rank;
}

std::optional<int> far_cause_of_failure(const std::vector<Ending>& endings) {
  const auto first = std::find_if(endings.begin(), endings.end(), [](const Ending& ending) {
    return ending.failed() && !ending.asked_to_end;
  });
  if (first == endings.end()) return std::nullopt;
  const int cause = cause_of_failure(endings, first->local_rank);
  const auto ending = std::find_if(endings.begin(), endings.end(),
                                   [&](const Ending& one) { return one.local_rank == cause; });
  return ending == endings.end() || was_killed(*ending) ? std::nullopt : ending->far_culprit;
}

Supervisor::Supervisor(int nprocs, Options options)
    : options_(std::move(options)),
      exit_status_(options_.exit_status
                       ? options_.exit_status
                       : std::make_shared<ExitStatusTable>(ExitStatusTable::create(checked_count(nprocs)))),
      cgroup_(options_.owns_job ? WorkerCgroup::make() : std::nullopt),
      guardian_(nprocs, options_.temporary, cgroup_ ? cgroup_->folder() : std::string()) {
  if (options_.owns_job) memory_.emplace(cgroup_ ? cgroup_->folder() : std::string());
  workers_.reserve(static_cast<size_t>(nprocs));
}

Supervisor::~Supervisor() {
  for (Worker& worker : workers_) worker.process.signal_group(SIGKILL);  // all before the first is waited for
  workers_.clear();
  cgroup_.reset();
}

void Supervisor::start(WorkerSpec spec) {
  TORCH_INTERNAL_ASSERT(workers_.size() < workers_.capacity());
  spec.inherited.push_back(exit_status_->fd());
  if (cgroup_) spec.cgroup = cgroup_->fd();
  const int local_rank = static_cast<int>(workers_.size());
  workers_.push_back({WorkerProcess::start(spec, &guardian_)});
  exit_status_->record_start(local_rank, workers_.back().process.pid());
}

std::vector<std::pair<int, pid_t>> Supervisor::running() const {
  std::vector<std::pair<int, pid_t>> all;
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i].phase == WorkerPhase::kRunning)
      all.emplace_back(static_cast<int>(i), workers_[i].process.pid());
  }
  return all;
}

std::vector<pid_t> Supervisor::pids() const {
  std::vector<pid_t> all;
  for (const Worker& worker : workers_) all.push_back(worker.process.pid());
  return all;
}

void Supervisor::enter(JobPhase next) {
  phase_ = std::max(phase_, next);
}

const std::vector<Ending>& Supervisor::run(Streams& streams) {
  while (!all_ended()) {
    wait_once(streams, earlier(options_.deadline, earlier(terminate_at_, kill_at_)));
    if (memory_) memory_->look(Deadline::Clock::now());
    for (int rank : streams.failed_ranks()) note_failure(rank);
    take_signals();
    act_on_deadlines();
  }
  // The last output; a process that still holds a stream open gets a moment for it, unless SIGKILL was
  // already sent.
  const Deadline drained = phase_ == JobPhase::kKilled ? Deadline::after(std::chrono::nanoseconds(0))
                                                       : Deadline::after(kDrainTime);
  for (Deadline until = Deadline::after(std::chrono::nanoseconds(0));; until = earlier(drained, kill_at_)) {
    wait_once(streams, until);
    take_signals();
    if (streams.finished() || drained.expired() || kill_at_.expired()) break;
  }
  for (Ending& ending : endings_) {  // while their pids are no other processes'
    if (memory_ && ending.was_ended_by_sigkill()) ending.out_of_memory = memory_->evidence_of(ending.pid);
  }
  for (Worker& worker : workers_) worker.process.reap();
  cgroup_.reset();
  return endings_;
}

void Supervisor::wait_once(Streams& streams, Deadline until) {
  std::vector<pollfd> waits = {{signals_.fd(), POLLIN, 0}};
  for (const Worker& worker : workers_) {
    if (worker.phase != WorkerPhase::kEnded) waits.push_back({worker.process.pidfd(), POLLIN, 0});
  }
  const auto own = static_cast<std::ptrdiff_t>(waits.size());
  streams.add_to(waits);
  const int ready = ::poll(waits.data(), waits.size(), earlier(until, streams.wake_at()).poll_milliseconds());
  TORCH_CHECK_WITH(DistBackendError, ready >= 0 || errno == EINTR, "poll: ", std::strerror(errno));
  if (ready < 0) {
    for (pollfd& wait : waits) wait.revents = 0;
  }
  // Ends before messages: what another rank says may be its reaction to an end.
  if (std::any_of(waits.begin() + 1, waits.begin() + own,
                  [](const pollfd& wait) { return wait.revents != 0; })) {
    collect_endings();
  }
  streams.serve(waits.data() + own, waits.data() + waits.size());
}

void Supervisor::collect_endings() {
  const auto now = Deadline::Clock::now();
  std::vector<Ending> fresh;
  for (size_t i = 0; i < workers_.size(); ++i) {
    Worker& worker = workers_[i];
    if (worker.phase == WorkerPhase::kEnded) continue;
    auto status = worker.process.wait_status();
    if (!status) continue;
    const bool asked_to_end = std::exchange(worker.phase, WorkerPhase::kEnded) == WorkerPhase::kAskedToEnd;
    const int local_rank = static_cast<int>(i);
    exit_status_->record_end(local_rank, *status);
    fresh.push_back({local_rank, worker.process.pid(), *status, asked_to_end, now,
                     exit_status_->culprit_of(local_rank), exit_status_->far_culprit_of(local_rank)});
    if (memory_ && fresh.back().was_ended_by_sigkill()) memory_->note_kill(worker.process.pid(), now);
  }
  order_simultaneous(fresh);
  endings_.insert(endings_.end(), fresh.begin(), fresh.end());
  for (const Ending& ending : fresh) {
    if (ending.failed()) note_failure(ending.local_rank);
  }
}

void Supervisor::note_failure(int local_rank) {
  const auto index = static_cast<size_t>(local_rank);
  const bool tolerated = index < options_.may_fail.size() && options_.may_fail[index];
  // The first failure sets the deadlines. After a signal to the launcher the workers are ending anyhow, each
  // in its own time.
  if (tolerated || phase_ != JobPhase::kRunning) return;
  enter(JobPhase::kEnding);
  terminate_at_ = Deadline::after(std::min<std::chrono::nanoseconds>(kReactionTime, options_.grace_period));
  kill_at_ = Deadline::after(options_.grace_period);
}

void Supervisor::stop(std::chrono::nanoseconds grace_period) {
  enter(JobPhase::kEnding);
  terminate_at_ = Deadline::never();
  kill_at_ = earlier(kill_at_, Deadline::after(grace_period));
  if (grace_period.count() > 0) signal_running(SIGTERM);
}

bool Supervisor::interrupted() {
  take_signals();
  return interrupted_by_.has_value();
}

void Supervisor::take_signals() {
  while (auto signal = signals_.take()) {
    if (*signal == SIGUSR2) {
      signal_those_that_catch(*signal);
      continue;
    }
    if (interrupted_by_) {
      kill_at_ = Deadline::after(std::chrono::nanoseconds(0));
      continue;
    }
    interrupted_by_ = signal;
    enter(JobPhase::kEnding);
    kill_at_ = earlier(kill_at_, Deadline::after(options_.grace_period));
    signal_running(*signal);
  }
}

void Supervisor::act_on_deadlines() {
  if (options_.deadline.expired() && !all_ended()) {
    deadline_passed_ = true;
    kill_at_ = std::exchange(options_.deadline, Deadline::never());
  }
  if (kill_at_.expired()) {
    signal_running(SIGKILL);
    kill_at_ = Deadline::never();
    enter(JobPhase::kKilled);
  } else if (terminate_at_.expired()) {
    signal_running(SIGTERM);
    terminate_at_ = Deadline::never();
  }
}

void Supervisor::signal_running(int signal) {
  for (Worker& worker : workers_) {
    if (worker.phase == WorkerPhase::kEnded || worker.process.wait_status()) continue;
    worker.phase = WorkerPhase::kAskedToEnd;
    worker.process.signal_group(signal);
    worker.process.signal_group(SIGCONT);  // a stopped process gets no other signal
  }
}

void Supervisor::signal_those_that_catch(int signal) {
  size_t told = 0;
  for (Worker& worker : workers_) {
    const pid_t pid = worker.process.pid();
    if (worker.phase == WorkerPhase::kEnded || worker.process.wait_status() || !catches(pid, signal))
      continue;
    ::kill(pid, signal);  // not its group, where it would end what has no handler
    ++told;
  }
  if (told > 0) return;
  LOCKSTEP_LOG(kWarning) << "SIGUSR2: no process has a handler for it, so none has got it";
}

}  // namespace lockstep::launch
