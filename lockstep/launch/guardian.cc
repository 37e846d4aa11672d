#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/base/process/pidfd.h>
#include <lockstep/launch/cgroups.h>
#include <lockstep/launch/guardian.h>

namespace lockstep::launch {
namespace {

constexpr pid_t kGoodbye = 0;

// What its launcher tells the guardian: a process group, or a lease. The kernel keeps them apart.
union GuardianMessage {
  pid_t group;
  int64_t lease;
};
static_assert(sizeof(pid_t) != sizeof(int64_t));

// The guardian's life. After a fork in a process with threads: async-signal-safe calls only, and no return.
[[noreturn]] void keep_watch(int line, int launcher, pid_t* groups, size_t capacity,
                             const std::vector<std::string>& temporary, const std::string& cgroup,
                             const std::string& kill_file) {
  ::prctl(PR_SET_NAME, "lockstep-guard");
  ::setsid();
  // Descriptors 0 and 1 become the two that are needed; everything else, the launcher's output above all, is
  // closed.
  const int line_copy = ::fcntl(line, F_DUPFD, 3);
  const int launcher_copy = ::fcntl(launcher, F_DUPFD, 3);
  if (line_copy < 0 || launcher_copy < 0) ::_exit(1);
  ::dup2(line_copy, 0);
  ::dup2(launcher_copy, 1);
  ::closefrom(2);

  size_t count = 0;
  BootTime lease = BootTime::max();
  const auto kill_all = [&] {
    for (size_t i = 0; i < count; ++i) ::kill(-groups[i], SIGKILL);
    if (!cgroup.empty()) kill_cgroup(kill_file.c_str());
  };
  while (true) {
    pollfd waits[2] = {{0, POLLIN, 0}, {1, POLLIN, 0}};
    // poll's own clock stands still while the host is suspended.
    if (::poll(waits, 2, lease == BootTime::max() ? -1 : 250) < 0) continue;
    // First everything that was said, then what the launcher's end means.
    GuardianMessage message = {};
    ssize_t got = 0;
    while ((got = ::recv(0, &message, sizeof(message), MSG_DONTWAIT)) > 0) {
      if (got == sizeof(message.lease)) {
        lease = BootTime(BootClock::duration(message.lease));
        continue;
      }
      if (message.group == kGoodbye) ::_exit(0);
      if (count < capacity) groups[count++] = message.group;
    }
    if (BootClock::now() >= lease) {
      kill_all();
      lease = BootTime::max();
    }
    const bool hung_up = got == 0;
    if (!hung_up && waits[1].revents == 0) continue;
    kill_all();
    for (const std::string& path : temporary) {
      if (::unlink(path.c_str()) != 0) ::rmdir(path.c_str());
    }
    if (!cgroup.empty()) remove_cgroup(cgroup.c_str());
    ::_exit(0);
  }
}

}  // namespace

UniqueFd require_pidfd(pid_t pid) {
  UniqueFd fd = open_pidfd(pid);
  TORCH_CHECK_WITH(DistBackendError, static_cast<bool>(fd), "pidfd_open: ", std::strerror(errno),
                   errno == ENOSYS ? "; Lockstep needs Linux 5.4 or newer" : "");
  return fd;
}

Guardian::Guardian(int capacity, const std::vector<std::string>& temporary, const std::string& cgroup) {
  TORCH_CHECK_VALUE(capacity >= 1, "a guardian for ", capacity, " process groups");
  int ends[2] = {-1, -1};
  TORCH_CHECK_WITH(DistBackendError, ::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0,
                   "can't make the guardian's socket: ", std::strerror(errno));
  line_.reset(ends[0]);
  UniqueFd other_end(ends[1]);
  const UniqueFd launcher = require_pidfd(::getpid());
  // The forked process must not allocate.
  std::vector<pid_t> groups(static_cast<size_t>(capacity));
  const std::string kill_file = cgroup + "/cgroup.kill";

  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);  // no handler of this program may run in the guardian
  pid_ = ::fork();
  if (pid_ == 0) {
    keep_watch(other_end.get(), launcher.get(), groups.data(), groups.size(), temporary, cgroup, kill_file);
  }
  const int error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  TORCH_CHECK_WITH(DistBackendError, pid_ > 0, "can't fork the guardian process: ", std::strerror(error));
}

Guardian::~Guardian() {
  enlist(kGoodbye);
  line_.reset();
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Guardian::enlist(pid_t process_group) const {
  while (::send(line_.get(), &process_group, sizeof(process_group), MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

GuardianLease Guardian::lease() const {
  UniqueFd line(::fcntl(line_.get(), F_DUPFD_CLOEXEC, 0));
  TORCH_CHECK_WITH(DistBackendError, static_cast<bool>(line),
                   "can't copy the guardian's socket: ", std::strerror(errno));
  return GuardianLease(std::move(line));
}

void GuardianLease::renew(BootTime until) {
  if (until == until_) return;
  const int64_t lease = until.time_since_epoch().count();
  while (::send(line_.get(), &lease, sizeof(lease), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno == EINTR) {
  }
  // Else this process may have been stopped before, and the guardian have killed.
  if (BootClock::now() < until_) until_ = until;
}

}  // namespace lockstep::launch
