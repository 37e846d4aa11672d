#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <poll.h>
#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/launch/cgroups.h>
#include <lockstep/launch/guardian.h>
#include <lockstep/launch/out_of_memory.h>
#include <lockstep/launch/signal_catcher.h>
#include <lockstep/launch/worker_process.h>
#include <lockstep/rendezvous/exit_status_table.h>

namespace lockstep::launch {

/// How one worker ended.
struct Ending {
  int local_rank = 0;
  pid_t pid = 0;
  int wait_status = 0;
  bool asked_to_end = false;  // a signal was sent to it before it ended: its end says nothing about it
  Deadline::Clock::time_point at;
  std::optional<int> culprit = {};  // the local rank that made its operations fail, by the exit status table
  std::optional<int> far_culprit = {};  // or the rank on another host
  std::string out_of_memory =
      {};  // OutOfMemoryWatch::evidence_of(); empty: it was not that, or nothing shows it

  bool failed() const { return wait_status != 0; }
  /// Killed by SIGKILL, and not by the launcher: the kernel may have done it, for want of memory.
  bool was_ended_by_sigkill() const;
};

/// The one that comes first.
Deadline earlier(Deadline a, Deadline b);

/// To be called before a launcher opens anything: open_standard_streams(). Throws c10::DistBackendError when the limit
/// on open files is too low for `nprocs` workers, with `log_files` of each.
void prepare_descriptors(int nprocs, int log_files = 0);

/// Sorts endings that were noticed at the same moment, in any order, so that the first is told as the cause:
/// killed by a signal comes before an exit with an error (which may be the reaction to a peer's death),
/// SIGABRT (how an uncaught exception ends) counts as the latter, and then the ranks' order decides. Pure.
void order_simultaneous(std::vector<Ending>& endings);

/// Follows the culprits from this local rank on, which failed: the one at which they end is the cause of its
/// failure. A process that was killed by a signal has its cause outside; where ranks name each other it is
/// the given one. Pure.
int cause_of_failure(const std::vector<Ending>& endings, int local_rank);

/// The rank on another host that made the first failure of this host, if so. Pure.
std::optional<int> far_cause_of_failure(const std::vector<Ending>& endings);

/// What else the supervisor's loop serves beside the workers' ends: their output, their messages.
class Streams {
 public:
  virtual ~Streams() = default;
  /// Appends the descriptors to wait for.
  virtual void add_to(std::vector<pollfd>& waits) = 0;
  /// Is given the same entries again, with revents filled in; also called when only time has passed.
  virtual void serve(const pollfd* begin, const pollfd* end) = 0;
  /// When serve() is to be called at the latest.
  virtual Deadline wake_at() const { return Deadline::never(); }
  /// After the last worker's end and a last serve(): whether nothing more is to be waited for.
  virtual bool finished() const = 0;
  /// The local ranks that are known to have failed, perhaps before their processes have ended (a message said
  /// so).
  virtual std::vector<int> failed_ranks() const { return {}; }
};

/// Starts the workers of one machine and sees them to their end, whatever happens: the one place where
/// lockstep run and spawn() decide which worker is ended when.
///
/// - The first failure gives the others kReactionTime to notice it by themselves and say so, then SIGTERM,
///   and SIGKILL when the grace period, counted from the failure, is over.
/// - SIGINT, SIGTERM, SIGHUP, SIGQUIT or SIGUSR1 to the launcher are passed on; SIGKILL follows when the
///   grace period is over or at the second signal, but for SIGHUP, which a terminal that closes sends twice.
/// - SIGUSR2 to the launcher asks for profiles, and ends nothing: those workers get it that have a handler for it.
/// - At the deadline: SIGKILL.
/// - What workers left running in their process groups, or in their cgroup, is killed at the end, after kDrainTime for
///   those that still hold an output stream open (a `tee` that writes its last lines).
///
/// The exit status table is filled the moment an end is noticed.
///
/// Use in one thread, which must live until the end: the workers die with it.
class Supervisor {
 public:
  static constexpr std::chrono::milliseconds kReactionTime{1000};
  static constexpr std::chrono::seconds kDrainTime{5};

  struct Options {
    std::chrono::nanoseconds grace_period = std::chrono::seconds(30);
    // By local rank: a failure of this one leaves the others alone. Empty: every failure ends the rest.
    std::vector<bool> may_fail = {};
    Deadline deadline = Deadline::never();
    // Files of the launcher's, and then their folders: removed when the launcher is killed.
    std::vector<std::string> temporary = {};
    // A launcher that starts workers again and again gives the table of all; without one these workers have their own.
    std::shared_ptr<ExitStatusTable> exit_status = {};
    // The job is this process's only work: the workers have a cgroup of their own where that is allowed, and endings
    // tell what the kernel has killed for want of memory.
    bool owns_job = false;
  };

  Supervisor(int nprocs, Options options);
  ~Supervisor();

  const ExitStatusTable& exit_status() const { return *exit_status_; }
  /// Starts the next local rank, with LOCKSTEP_EXIT_STATUS_FD's descriptor inherited (the variable itself
  /// stands in the specification's environment). Throws as WorkerProcess::start.
  void start(WorkerSpec spec);
  /// Whether a signal has come to the launcher, which begins to take them when this object is made.
  bool interrupted();
  /// Ends the workers: SIGTERM, and SIGKILL once the grace period is over, or at once where that is zero. For a
  /// Streams::serve(), whose host is told by another one that this job's workers must end.
  void stop(std::chrono::nanoseconds grace_period);
  /// That of the workers' guardian.
  GuardianLease lease() const { return guardian_.lease(); }
  /// The local ranks that run and were not asked to end, and their pids.
  std::vector<std::pair<int, pid_t>> running() const;
  /// The list has all workers, also those that have ended.
  std::vector<pid_t> pids() const;
  /// Waits for all that were started. Returns how they ended, in order.
  const std::vector<Ending>& run(Streams& streams);

  /// The first signal that came to the launcher, if any.
  std::optional<int> interrupted_by() const { return interrupted_by_; }
  bool deadline_passed() const { return deadline_passed_; }

 private:
  /// In the order in which they follow each other; some may be left out.
  enum class JobPhase : uint8_t {
    kRunning,  // nothing has happened
    kEnding,   // a worker has failed, or a signal has come: kill_at_ is set
    kKilled,   // SIGKILL was sent; now only the kernel can delay the workers' ends
  };
  enum class WorkerPhase : uint8_t { kRunning, kAskedToEnd, kEnded };
  struct Worker {
    WorkerProcess process;
    WorkerPhase phase = WorkerPhase::kRunning;
  };

  /// The one place where the phase changes, which never goes back.
  void enter(JobPhase next);
  void collect_endings();
  void note_failure(int local_rank);
  void take_signals();
  void act_on_deadlines();
  void signal_running(int signal);
  void signal_those_that_catch(int signal);
  void wait_once(Streams& streams, Deadline until);
  bool all_ended() const { return endings_.size() == workers_.size(); }

  Options options_;
  SignalCatcher signals_;
  std::shared_ptr<ExitStatusTable> exit_status_;
  std::optional<WorkerCgroup> cgroup_;
  std::optional<OutOfMemoryWatch> memory_;
  Guardian guardian_;
  std::vector<Worker> workers_;
  std::vector<Ending> endings_;
  JobPhase phase_ = JobPhase::kRunning;
  std::optional<int> interrupted_by_;
  bool deadline_passed_ = false;
  Deadline terminate_at_ = Deadline::never();
  Deadline kill_at_ = Deadline::never();
};

}  // namespace lockstep::launch
