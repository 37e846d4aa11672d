#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <linux/close_range.h>
#include <signal.h>
#include <stdexcept>
#include <string>
#include <string_view>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <lockstep/base/unique_fd.h>
#include <lockstep/testing/rank_server.h>

namespace lockstep::testing {
namespace {

constexpr const char* kServer = "--rank-server";
constexpr size_t kMostDescriptors = 16;
constexpr size_t kMostBytes = 1 << 20;
// Descriptors wait above this number until those that a rank shall have are free; no rank's number is above
// it.
constexpr int kAside = 512;

std::vector<std::string> environment_of_this_process() {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) variables.emplace_back(*variable);
  return variables;
}

std::vector<rlim_t> limits_of_this_process() {
  std::vector<rlim_t> limits;
  for (int resource = 0; resource < RLIM_NLIMITS; ++resource) {
    struct rlimit limit = {};
    ::getrlimit(static_cast<__rlimit_resource>(resource), &limit);
    limits.insert(limits.end(), {limit.rlim_cur, limit.rlim_max});
  }
  return limits;
}

/// Whether a library may read the variable when it is loaded: the loader, malloc, OpenMP, LibTorch, CUDA,
/// sanitizers and GoogleTest.
[[maybe_unused]] bool read_at_load(std::string_view name) {
  for (const char* prefix : {"LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_",
                             "TORCH_", "PYTORCH_", "ATEN_", "C10_", "CUDA_", "NVIDIA_", "NCCL_", "GTEST_"}) {
    if (name.starts_with(prefix)) return true;
  }
  return name.ends_with("SAN_OPTIONS");
}

/// What a program was started with, which the server then has, too.
struct Start {
  std::vector<std::string> environment = environment_of_this_process();
  std::vector<rlim_t> limits = limits_of_this_process();
};

const Start& start_of_this_process() {
  static const Start start;
  return start;
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("the server that forks ranks: " + what + ": " + std::strerror(errno));
}

/// What is asked of the server. As bytes: numbers and texts in lines that end with a zero.
struct Request {
  std::vector<std::string> arguments;
  std::vector<std::string> environment;
  std::string folder;
  std::vector<int> targets;  // the numbers that the rank shall have the descriptors under

  std::string bytes() const {
    std::string text;
    auto add = [&](std::string_view line) { text.append(line).push_back('\0'); };
    auto add_all = [&](const std::vector<std::string>& lines) {
      add(std::to_string(lines.size()));
      for (const auto& line : lines) add(line);
    };
    add_all(arguments);
    add_all(environment);
    add(folder);
    add(std::to_string(targets.size()));
    for (int target : targets) add(std::to_string(target));
    return text;
  }

  static Request read(std::string_view bytes) {
    auto line = [&] {
      const size_t end = bytes.find('\0');
      std::string text(bytes.substr(0, end));
      bytes.remove_prefix(end + 1);
      return text;
    };
    Request request;
    auto read_all = [&](std::vector<std::string>& lines) {
      lines.resize(std::stoul(line()));
      for (auto& text : lines) text = line();
    };
    read_all(request.arguments);
    read_all(request.environment);
    request.folder = line();
    request.targets.resize(std::stoul(line()));
    for (int& target : request.targets) target = std::stoi(line());
    return request;
  }
};

union ControlBuffer {
  char bytes[CMSG_SPACE(kMostDescriptors * sizeof(int))];
  cmsghdr align;
};

void send_request(int socket, const Request& request, const std::vector<int>& descriptors) {
  std::string bytes = request.bytes();
  const bool numbers_fit =
      std::all_of(request.targets.begin(), request.targets.end(), [](int fd) { return fd < kAside; });
  if (bytes.size() > kMostBytes || descriptors.size() > kMostDescriptors || !numbers_fit) {
    errno = EMSGSIZE;
    fail("a rank's arguments, environment or descriptors are too many");
  }
  iovec part = {bytes.data(), bytes.size()};
  ControlBuffer control = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  }
  while (::sendmsg(socket, &message, MSG_NOSIGNAL) < 0) {
    if (errno != EINTR) fail("a request can't be sent");
  }
}

/// The next request and its descriptors. The server ends here when the test program has closed its end.
Request receive_request(int socket, std::vector<int>& descriptors) {
  static std::string bytes(kMostBytes, '\0');
  iovec part = {bytes.data(), bytes.size()};
  ControlBuffer control = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  ssize_t got = 0;
  while ((got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR) {
  }
  if (got <= 0) ::_exit(0);
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message)) {
    descriptors.resize((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(descriptors.data(), CMSG_DATA(header), descriptors.size() * sizeof(int));
  }
  return Request::read(std::string_view(bytes.data(), static_cast<size_t>(got)));
}

/// In the new process: gives it the state that one of launch/worker_process.cc has after execve.
void become_rank(const Request& request, const std::vector<int>& descriptors, pid_t test_program) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != test_program) ::_exit(127);
  launch::reset_signals();

  std::vector<int> aside;
  for (int fd : descriptors) aside.push_back(::fcntl(fd, F_DUPFD_CLOEXEC, kAside));
  if (std::find(aside.begin(), aside.end(), -1) != aside.end()) ::_exit(127);
  ::close_range(3, kAside - 1, 0);
  for (size_t i = 0; i < aside.size(); ++i) {
    if (::dup2(aside[i], request.targets[i]) < 0) ::_exit(127);
  }
  ::close_range(kAside, ~0U, 0);
  if (::chdir(request.folder.c_str()) != 0) ::_exit(127);
}

/// Forks a process that becomes the test program's child: what its parent leaves behind is given to the
/// nearest process above that asks for it. Returns 0 in the new process once that has happened, elsewhere its
/// pid.
pid_t fork_for_parent() {
  int go[2] = {-1, -1};
  int answer[2] = {-1, -1};
  if (::pipe2(go, O_CLOEXEC) != 0 || ::pipe2(answer, O_CLOEXEC) != 0) return -1;
  const pid_t between = ::fork();
  if (between == 0) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(go[1]);
      char nothing = 0;
      while (::read(go[0], &nothing, 1) < 0 && errno == EINTR) {  // until the server closes it
      }
      ::setpgid(0, 0);
      return 0;
    }
    ::_exit(::write(answer[1], &child, sizeof(child)) == sizeof(child) ? 0 : 1);
  }
  pid_t child = -1;
  ::close(answer[1]);
  if (between > 0 && ::read(answer[0], &child, sizeof(child)) != sizeof(child)) child = -1;
  while (between > 0 && ::waitpid(between, nullptr, 0) < 0 && errno == EINTR) {
  }
  for (int fd : {go[0], go[1], answer[0]}) ::close(fd);
  return child;
}

/// The server's life. Returns in the processes that it forks.
Request serve(int socket) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const pid_t test_program = ::getppid();
  while (true) {
    std::vector<int> descriptors;
    Request request = receive_request(socket, descriptors);
    const pid_t child = fork_for_parent();
    if (child == 0) {
      become_rank(request, descriptors, test_program);
      return request;
    }
    for (int fd : descriptors) ::close(fd);
    if (::send(socket, &child, sizeof(child), MSG_NOSIGNAL) != sizeof(child)) ::_exit(1);
  }
}

struct Server {
  UniqueFd line;
  pid_t pid = -1;
};

/// None before the first rank.
Server& server() {
  static Server server;
  return server;
}

Server start_server() {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) fail("no socket");
  UniqueFd ours(ends[0]);
  const UniqueFd theirs(ends[1]);
  int size = static_cast<int>(kMostBytes);
  ::setsockopt(ours.get(), SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
  const std::string number = std::to_string(theirs.get());
  // What libraries read when they are loaded is as in a rank that is started afresh.
  std::vector<std::string> variables;
  for (const auto& variable : start_of_this_process().environment) {
    if (!variable.starts_with("GTEST_") && !variable.starts_with("OMP_NUM_THREADS="))
      variables.push_back(variable);
  }
  variables.emplace_back("OMP_NUM_THREADS=1");
  std::vector<char*> environment;
  for (auto& variable : variables) environment.push_back(variable.data());
  environment.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) fail("no process");
  if (pid == 0) {  // only what is async-signal-safe: the test program may have threads
    // Nothing that the test program has open stays open through it.
    ::close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
    ::fcntl(theirs.get(), F_SETFD, 0);
    ::execle("/proc/self/exe", program_invocation_name, kServer, number.c_str(), nullptr, environment.data());
    ::_exit(127);
  }
  return {std::move(ours), pid};
}

}  // namespace

void start_as_rank_or_return(int& argc, char**& argv) {
  start_of_this_process();
  if (argc != 3 || std::string_view(argv[1]) != kServer) return;
  // For the rest of the process's life, in which it is argv and environ.
  static Request request;
  static std::vector<char*> arguments;
  request = serve(std::stoi(argv[2]));
  for (auto& argument : request.arguments) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  argc = static_cast<int>(request.arguments.size());
  argv = arguments.data();
  ::clearenv();
  for (auto& variable : request.environment) ::putenv(variable.data());
}

bool can_fork_rank(const std::vector<std::pair<std::string, std::optional<std::string>>>& changes) {
#ifdef __SANITIZE_THREAD__
  (void)changes;
  return false;
#else
  for (const auto& change : changes) {
    if (read_at_load(change.first)) return false;
  }
  const auto of_load = [](std::vector<std::string> variables) {
    std::erase_if(variables, [](const std::string& variable) {
      return !read_at_load(variable.substr(0, variable.find('=')));
    });
    std::sort(variables.begin(), variables.end());
    return variables;
  };
  return of_load(environment_of_this_process()) == of_load(start_of_this_process().environment) &&
         limits_of_this_process() == start_of_this_process().limits;
#endif
}

pid_t fork_rank(const launch::WorkerSpec& spec) {
  if (!server().line) server() = start_server();
  Request request = {spec.arguments, spec.environment, std::filesystem::current_path(), {}};
  std::vector<int> descriptors;
  for (size_t target = 0; target < spec.standard.size(); ++target) {
    // What the server has as its own may be another one than this process's by now.
    descriptors.push_back(spec.standard[target] >= 0 ? spec.standard[target] : static_cast<int>(target));
    request.targets.push_back(static_cast<int>(target));
  }
  for (int fd : spec.inherited) {
    descriptors.push_back(fd);
    request.targets.push_back(fd);
  }
  int reaps = 0;
  ::prctl(PR_GET_CHILD_SUBREAPER, &reaps);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  send_request(server().line.get(), request, descriptors);
  pid_t pid = -1;
  ssize_t got = 0;
  while ((got = ::recv(server().line.get(), &pid, sizeof(pid), 0)) < 0 && errno == EINTR) {
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, reaps);
  if (got != sizeof(pid) || pid <= 0) {
    stop_rank_server();
    fail("no rank was forked");
  }
  ::setpgid(pid, pid);  // the rank does it too; the first of both counts
  return pid;
}

void stop_rank_server() {
  if (!server().line) return;
  server().line.reset();  // which it takes for the program's end
  while (::waitpid(server().pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace lockstep::testing
