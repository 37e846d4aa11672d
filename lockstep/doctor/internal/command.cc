#include <array>
#include <cerrno>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string_view>
#include <sys/wait.h>
#include <unistd.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/process/pidfd.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/doctor/internal/command.h>

namespace lockstep::doctor::internal {
namespace {

constexpr size_t kMostOutput = 1 << 20;

/// posix_spawn's list of what to do to descriptors in the child.
class FileActions {
 public:
  FileActions() { ::posix_spawn_file_actions_init(&actions_); }
  FileActions(const FileActions&) = delete;
  FileActions& operator=(const FileActions&) = delete;
  ~FileActions() { ::posix_spawn_file_actions_destroy(&actions_); }
  posix_spawn_file_actions_t* get() { return &actions_; }

 private:
  posix_spawn_file_actions_t actions_;
};

std::vector<std::string> plain_environment() {
  std::vector<std::string> result = {"LC_ALL=C"};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (!std::string_view(*entry).starts_with("LC_ALL=")) result.emplace_back(*entry);
  }
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& text : strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

pid_t start(std::vector<std::string> argv, int output) {
  FileActions actions;
  ::posix_spawn_file_actions_addopen(actions.get(), 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(actions.get(), output, 1);
  ::posix_spawn_file_actions_adddup2(actions.get(), output, 2);
  auto environment = plain_environment();
  auto arguments = pointers(argv);
  auto variables = pointers(environment);
  pid_t pid = -1;
  const int error =
      ::posix_spawn(&pid, argv[0].c_str(), actions.get(), nullptr, arguments.data(), variables.data());
  return error == 0 ? pid : -1;
}

/// Reads until the end of file or the deadline; whether the end came.
bool read_all(int fd, const Deadline& deadline, std::string& output) {
  std::array<char, 4096> buffer;
  while (!deadline.expired()) {
    pollfd wait{fd, POLLIN, 0};
    if (::poll(&wait, 1, deadline.poll_milliseconds()) <= 0) continue;  // a signal, or the deadline
    const ssize_t got = ::read(fd, buffer.data(), buffer.size());
    if (got == 0) return true;
    if (got < 0) continue;
    if (output.size() < kMostOutput) output.append(buffer.data(), static_cast<size_t>(got));
  }
  return false;
}

/// Whether the child ended (it is not reaped) by the deadline.
bool wait_for_end(pid_t pid, const Deadline& deadline) {
  const UniqueFd end = open_pidfd(pid);
  if (!end) return true;  // before Linux 5.3: waitpid() has to do without a deadline
  pollfd wait{end.get(), POLLIN, 0};
  while (::poll(&wait, 1, deadline.poll_milliseconds()) < 0 && errno == EINTR) {
  }
  return wait.revents != 0;
}

}  // namespace

CommandResult run_command(const std::vector<std::string>& argv, std::chrono::nanoseconds timeout) {
  CommandResult result;
  int ends[2] = {-1, -1};
  if (argv.empty() || ::pipe2(ends, O_CLOEXEC) != 0) return result;
  const UniqueFd in(ends[0]);
  UniqueFd out(ends[1]);
  const pid_t pid = start(argv, out.get());
  if (pid < 0) return result;
  result.started = true;
  out.reset();
  const Deadline deadline = Deadline::after(timeout);
  const bool ended = read_all(in.get(), deadline, result.output) && wait_for_end(pid, deadline);
  result.timed_out = !ended;
  if (!ended) {
    ::kill(pid, SIGKILL);
    // One that waits within a broken driver can't even be killed; it is left behind.
    if (!wait_for_end(pid, Deadline::after(std::chrono::seconds(1)))) return result;
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (ended && WIFEXITED(status)) result.exit_status = WEXITSTATUS(status);
  return result;
}

}  // namespace lockstep::doctor::internal
