#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <linux/close_range.h>
#include <linux/sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/base/process/cpu.h>
#include <lockstep/launch/worker_process.h>

namespace lockstep::launch {
namespace {

std::optional<rlimit> former_open_files;  // before raise_open_files_limit()

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

void close_on_exec(int fd, bool yes) {
  ::fcntl(fd, F_SETFD, yes ? FD_CLOEXEC : 0);
}

/// Gives all signals their default dispositions, and blocks none. Async-signal-safe.
void reset_signals() {
  struct sigaction standard = {};
  standard.sa_handler = SIG_DFL;
  for (int signal = 1; signal < NSIG; ++signal) ::sigaction(signal, &standard, nullptr);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

// From fork to exec. The forking program has threads whose locks are frozen here: async-signal-safe calls
// only.
[[noreturn]] void become_worker(const WorkerSpec& spec, char** argv, char** envp, const CoreMask* cores,
                                pid_t launcher, int failure, const Guardian* guardian) {
  // A launcher that ended before prctl would never send the signal.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(127);
  ::setpgid(0, 0);
  if (guardian != nullptr) guardian->enlist(::getpid());

  const auto fail = [failure](int error) {
    [[maybe_unused]] auto written = ::write(failure, &error, sizeof(error));
    ::_exit(127);
  };
  reset_signals();
  if (cores != nullptr && !cores->apply(0)) fail(errno);
  if (former_open_files) ::setrlimit(RLIMIT_NOFILE, &*former_open_files);

  for (int target = 0; target < 3; ++target) {
    const int source = spec.standard[static_cast<size_t>(target)];
    if (source >= 0 && ::dup2(source, target) < 0) ::_exit(127);
  }
  if (::close_range(3, ~0U, CLOSE_RANGE_CLOEXEC) != 0) {  // before Linux 5.11
    for (int fd = 3; fd < 4096; ++fd) close_on_exec(fd, true);
  }
  for (int fd : spec.inherited) close_on_exec(fd, false);

  ::execve(spec.program.c_str(), argv, envp);
  fail(errno);
  ::_exit(127);
}

}  // namespace

pid_t fork_into(int cgroup) {
  if (cgroup >= 0) {
    clone_args arguments = {};
    arguments.flags = CLONE_INTO_CGROUP;
    arguments.exit_signal = SIGCHLD;
    arguments.cgroup = static_cast<uint64_t>(cgroup);
    const auto pid = ::syscall(SYS_clone3, &arguments, sizeof(arguments));
    if (pid >= 0) return static_cast<pid_t>(pid);
  }
  return ::fork();
}

void raise_open_files_limit() {
  rlimit limit = {};
  if (former_open_files || ::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  former_open_files = limit;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

WorkerProcess WorkerProcess::start(const WorkerSpec& spec, const Guardian* guardian) {
  if (auto made = spec.make_process ? spec.make_process(spec) : std::nullopt) {
    WorkerProcess worker(made->pid, UniqueFd());
    if (guardian != nullptr) guardian->enlist(made->pid);
    worker.pidfd_ = require_pidfd(made->pid);
    TORCH_CHECK_WITH(DistBackendError, spec.cores.empty() || CoreMask(spec.cores).apply(made->pid),
                     "can't keep '", spec.program, "' on its cores: ", std::strerror(errno));
    ::send(made->go.get(), "g", 1, MSG_NOSIGNAL);  // it has ended where that fails, which the pidfd tells
    return worker;
  }
  int ends[2] = {-1, -1};
  TORCH_CHECK_WITH(DistBackendError, ::pipe2(ends, O_CLOEXEC) == 0,
                   "can't make a pipe: ", std::strerror(errno));
  UniqueFd failure_in(ends[0]);
  UniqueFd failure_out(ends[1]);
  auto argv = pointers(spec.arguments);
  auto envp = pointers(spec.environment);
  const CoreMask cores(spec.cores);
  const pid_t launcher = ::getpid();

  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);  // no handler of this program may run in the child
  const pid_t pid = fork_into(spec.cgroup);
  if (pid == 0) {
    become_worker(spec, argv.data(), envp.data(), spec.cores.empty() ? nullptr : &cores, launcher,
                  failure_out.get(), guardian);
  }
  const int fork_error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  TORCH_CHECK_WITH(DistBackendError, pid > 0, "can't start '", spec.program,
                   "': fork: ", std::strerror(fork_error),
                   fork_error == EAGAIN ? "; raise the limit on processes (ulimit -u) or start fewer" : "");
  ::setpgid(pid, pid);                    // the child does it too, and either may come first
  WorkerProcess worker(pid, UniqueFd());  // from here on it is killed and reaped if anything throws
  worker.pidfd_ = require_pidfd(pid);

  // The pipe ends without a word when exec succeeded, and closes.
  failure_out.reset();
  int exec_error = 0;
  ssize_t got = 0;
  while ((got = ::read(failure_in.get(), &exec_error, sizeof(exec_error))) < 0 && errno == EINTR) {
  }
  TORCH_CHECK_WITH(DistBackendError, got == 0, "can't start '", spec.program,
                   "': ", std::strerror(exec_error),
                   exec_error == ENOEXEC ? "; a script needs a first line such as #!/bin/sh" : "");
  return worker;
}

WorkerProcess::WorkerProcess(WorkerProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), pidfd_(std::move(other.pidfd_)), status_(other.status_) {}

WorkerProcess::~WorkerProcess() {
  reap();
}

std::optional<int> WorkerProcess::wait_status() {
  if (status_ || pid_ < 0) return status_;
  siginfo_t info = {};
  int result = 0;
  while ((result = ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT | WNOHANG)) != 0 &&
         errno == EINTR) {
  }
  TORCH_CHECK_WITH(
      DistBackendError, result == 0, "the status of process ", pid_, " is lost: ", std::strerror(errno),
      "; something in this program waits for all child processes (waitpid(-1) or an ignored SIGCHLD)");
  if (info.si_pid == 0) return std::nullopt;
  status_ = info.si_code == CLD_EXITED ? info.si_status << 8
                                       : info.si_status | (info.si_code == CLD_DUMPED ? 0x80 : 0);
  return status_;
}

void WorkerProcess::signal_group(int signal) const {
  if (pid_ > 0) ::kill(-pid_, signal);
}

void WorkerProcess::reap() {
  if (pid_ < 0) return;
  signal_group(SIGKILL);
  ::kill(pid_, SIGKILL);  // in case it has left its group
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
}

}  // namespace lockstep::launch
