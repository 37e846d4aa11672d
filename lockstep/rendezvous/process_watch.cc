#include <cerrno>
#include <charconv>
#include <chrono>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/process/pidfd.h>
#include <lockstep/rendezvous/exit_status_table.h>
#include <lockstep/rendezvous/process_stat.h>
#include <lockstep/rendezvous/process_watch.h>

namespace lockstep {
namespace {

/// From linux/pidfd.h (6.15); Debian 12's headers are older than the kernels that people run.
struct PidfdInfo {
  uint64_t mask;
  uint64_t cgroupid;
  uint32_t ids[11];
  int32_t exit_code;
};
constexpr uint64_t kPidfdInfoExit = 1 << 3;
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);

/// The wait status that the kernel remembers once the process was reaped.
std::optional<int> kernel_exit_status(int pidfd) {
  PidfdInfo info{};
  info.mask = kPidfdInfoExit;
  if (pidfd < 0 || ::ioctl(pidfd, kPidfdGetInfo, &info) != 0 || (info.mask & kPidfdInfoExit) == 0)
    return std::nullopt;
  return info.exit_code;
}

}  // namespace

std::string ProcessIdentity::to_string() const {
  return std::to_string(pid) + ' ' + std::to_string(start) + ' ' + host.to_string();
}

ProcessIdentity ProcessIdentity::parse(const std::string& text) {
  ProcessIdentity process;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto read = [&](auto& number) {
    const auto [stop, error] = std::from_chars(at, end, number);
    const bool good = error == std::errc() && stop != end && *stop == ' ';
    if (good) at = stop + 1;
    return good;
  };
  const bool good = read(process.pid) && read(process.start) && process.pid > 0;
  TORCH_CHECK_VALUE(good, "'", text, "' is not the identity of a process");
  process.host = HostIdentity::parse(std::string(at, end));
  return process;
}

ProcessIdentity this_process() {
  ProcessIdentity process{.host = this_host(), .pid = ::getpid()};
  if (auto stat = read_process_stat(process.pid)) process.start = stat->start;
  return process;
}

ProcessWatch::ProcessWatch(const ProcessIdentity& process, const ProcessIdentity& own)
    : pid_(process.pid),
      start_(process.start),
      can_tell_(process.host == own.host && own.host.pid_namespace != 0 && process.start != 0) {
  if (!can_tell_) return;
  pidfd_ = open_pidfd(pid_);
  // The descriptor was opened first: with the same start, it is of that process.
  if (auto stat = read_process_stat(pid_); stat && stat->start != start_) pidfd_.reset();
}

bool ProcessWatch::has_ended() const {
  if (!can_tell_) return false;
  if (pidfd_) return process_has_ended(pidfd_);
  const auto stat = read_process_stat(pid_);
  if (!stat)
    return errno == ENOENT || errno == ESRCH;  // else, without a free descriptor say, it is not known
  return stat->start != start_ || stat->state == 'Z' || stat->state == 'X';
}

std::string ProcessWatch::describe_end() const {
  const auto end = known_end(pid_, pidfd_.get(), std::chrono::milliseconds(500));
  return "(pid " + std::to_string(pid_) + ") " +
         end.value_or("has ended (SIGKILL, out of memory, or as its own output says)");
}

std::string ProcessWatch::describe_stop() const {
  const auto stat = can_tell_ ? read_process_stat(pid_) : std::nullopt;
  if (!stat || stat->start != start_ || !stat->is_stopped()) return "";
  return c10::str("(pid ", pid_, ") is stopped (by SIGSTOP, SIGTSTP or a debugger; kill -CONT ", pid_,
                  " continues it)");
}

std::optional<std::string> known_end(pid_t pid, int pidfd, std::chrono::milliseconds patience) {
  pollfd end{pidfd, POLLIN, 0};
  if (pidfd >= 0) ::poll(&end, 1, kLongestEnding.count());
  const Deadline deadline = Deadline::after(patience);
  if (auto table = ExitStatusTable::from_environment()) {
    if (auto words = table->describe_end(pid, deadline)) return words;
  }
  do {
    if (auto status = kernel_exit_status(pidfd)) return describe_wait_status(*status);
    if (auto stat = read_process_stat(pid); stat && stat->state == 'Z')
      return describe_wait_status(stat->exit_code);
    ::poll(nullptr, 0, 2);
  } while (pidfd >= 0 && !deadline.expired());
  return std::nullopt;
}

}  // namespace lockstep
