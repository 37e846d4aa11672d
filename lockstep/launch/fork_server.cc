#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <poll.h>
#include <set>
#include <sstream>
#include <string_view>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/text/parse_number.h>
#include <lockstep/launch/fork_server.h>

namespace lockstep::launch {
namespace {

constexpr size_t kMostDescriptors = 16;
constexpr size_t kMostBytes = 1 << 20;
// In the server's first environment, for what a process's own has more: see show_environment().
constexpr std::string_view kRoom = "LOCKSTEP_FORK_SERVER_ROOM=";
constexpr size_t kRoomBytes = 8192;
constexpr auto kForkTimeout = std::chrono::seconds(10);
// Places among the descriptors of a request.
constexpr size_t kGo = 0;
constexpr size_t kFolder = 1;
constexpr size_t kFirstTarget = 2;
constexpr pid_t kReady = 0;  // what the server says once, before the pids

/// What is asked of the server, besides descriptors: the socket by which the process is told to go, its working directory, one for
/// each target, and that of its cgroup where it has one. As bytes: numbers and texts in lines that end with a zero.
struct ForkRequest {
  std::vector<std::string> arguments;
  std::vector<std::string> environment;
  std::vector<int> targets;  // the numbers that the process shall have the descriptors under

  std::string bytes() const {
    std::string text;
    auto add = [&](std::string_view line) { text.append(line).push_back('\0'); };
    auto add_all = [&](const std::vector<std::string>& lines) {
      add(std::to_string(lines.size()));
      for (const auto& line : lines) add(line);
    };
    add_all(arguments);
    add_all(environment);
    add(std::to_string(targets.size()));
    for (int target : targets) add(std::to_string(target));
    return text;
  }

  static ForkRequest read(std::string_view bytes) {
    auto line = [&] {
      const size_t end = bytes.find('\0');
      std::string text(bytes.substr(0, end));
      bytes.remove_prefix(end + 1);
      return text;
    };
    ForkRequest request;
    auto read_all = [&](std::vector<std::string>& lines) {
      lines.resize(std::stoul(line()));
      for (auto& text : lines) text = line();
    };
    read_all(request.arguments);
    read_all(request.environment);
    request.targets.resize(std::stoul(line()));
    for (int& target : request.targets) target = std::stoi(line());
    return request;
  }
};

/// A message of bytes and descriptors for sendmsg(2) or recvmsg(2).
class Envelope {
 public:
  /// With room for so many descriptors.
  Envelope(void* data, size_t bytes, size_t descriptors) : part_{data, bytes} {
    message.msg_iov = &part_;
    message.msg_iovlen = 1;
    message.msg_control = control_.bytes;
    message.msg_controllen = CMSG_SPACE(descriptors * sizeof(int));
  }
  Envelope(const Envelope&) = delete;
  Envelope& operator=(const Envelope&) = delete;

  msghdr message = {};

 private:
  iovec part_;
  union {
    char bytes[CMSG_SPACE(kMostDescriptors * sizeof(int))];
    cmsghdr align;
  } control_ = {};
};

bool send_request(int socket, const ForkRequest& request, const std::vector<int>& descriptors) {
  std::string bytes = request.bytes();
  if (bytes.size() > kMostBytes || descriptors.size() > kMostDescriptors) return false;
  Envelope envelope(bytes.data(), bytes.size(), descriptors.size());
  cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  ssize_t sent = 0;
  while ((sent = ::sendmsg(socket, &envelope.message, MSG_NOSIGNAL | MSG_DONTWAIT)) < 0 && errno == EINTR) {
  }
  return sent >= 0;
}

std::optional<pid_t> receive_pid(int socket, const Deadline& deadline) {
  while (true) {
    pollfd wait = {socket, POLLIN, 0};
    const int ready = ::poll(&wait, 1, deadline.poll_milliseconds());
    if (ready < 0 && errno == EINTR) continue;
    pid_t pid = -1;
    if (ready > 0 && ::recv(socket, &pid, sizeof(pid), MSG_DONTWAIT) == sizeof(pid)) return pid;
    if (ready != 0 || deadline.expired()) return std::nullopt;
  }
}

// ---- in the server

/// The next request and its descriptors; nothing where they have not come whole. The server ends here when its launcher has closed
/// the line.
std::optional<ForkRequest> receive_request(int socket, std::vector<int>& descriptors) {
  std::vector<char> bytes(kMostBytes);
  Envelope envelope(bytes.data(), bytes.size(), kMostDescriptors);
  const msghdr& message = envelope.message;
  ssize_t got = 0;
  while ((got = ::recvmsg(socket, &envelope.message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR) {
  }
  if (got <= 0) ::_exit(0);
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message)) {
    descriptors.resize((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(descriptors.data(), CMSG_DATA(header), descriptors.size() * sizeof(int));
  }
  if ((message.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) != 0) return std::nullopt;
  return ForkRequest::read(std::string_view(bytes.data(), static_cast<size_t>(got)));
}

/// In the new process: gives it the state that one of worker_process.cc has after execve, once the launcher knows it. Handlers of
/// signals are those of the libraries, if any.
void become_forked(const ForkRequest& request, const std::vector<int>& descriptors, pid_t launcher) {
  ::setpgid(0, 0);
  char go = 0;
  ssize_t got = 0;
  while ((got = ::read(descriptors[kGo], &go, 1)) < 0 && errno == EINTR) {
  }
  if (got != 1) ::_exit(127);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(127);
  if (::fchdir(descriptors[kFolder]) != 0) ::_exit(127);

  // They wait above the numbers that they shall have until these are free.
  const int above = 1 + *std::max_element(request.targets.begin(), request.targets.end());
  std::vector<int> aside;
  for (size_t i = 0; i < request.targets.size(); ++i)
    aside.push_back(::fcntl(descriptors[kFirstTarget + i], F_DUPFD_CLOEXEC, above));
  if (std::find(aside.begin(), aside.end(), -1) != aside.end()) ::_exit(127);
  for (int fd = 3; fd < above; ++fd) ::close(fd);
  for (size_t i = 0; i < aside.size(); ++i) {
    if (::dup2(aside[i], request.targets[i]) < 0) ::_exit(127);
  }
  ::closefrom(above);
}

/// Forks a process that becomes the launcher's child: what its parent leaves behind is given to the nearest process above that
/// asks for it. Returns 0 in the new process; elsewhere its pid once that has happened, or -1.
pid_t fork_for_launcher(int cgroup) {
  int answer[2] = {-1, -1};
  if (::pipe2(answer, O_CLOEXEC) != 0) return -1;
  const pid_t between = fork_into(cgroup);
  if (between == 0) {
    const pid_t child = ::fork();
    if (child == 0) return 0;
    ::_exit(::write(answer[1], &child, sizeof(child)) == sizeof(child) ? 0 : 1);
  }
  pid_t child = -1;
  ::close(answer[1]);
  if (between > 0 && ::read(answer[0], &child, sizeof(child)) != sizeof(child)) child = -1;
  while (between > 0 && ::waitpid(between, nullptr, 0) < 0 && errno == EINTR) {
  }
  ::close(answer[0]);
  return child;
}

bool send_pid(int socket, pid_t pid) {
  return ::send(socket, &pid, sizeof(pid), MSG_NOSIGNAL) == sizeof(pid);
}

std::ptrdiff_t count_entries(const char* folder) {
  std::error_code error;
  const std::filesystem::directory_iterator entries(folder, error);
  return error ? -1 : std::distance(begin(entries), end(entries));
}

/// Whether the libraries have left nothing that a forked process would not have: threads, and open files, which might be under
/// the numbers of its own.
bool can_be_forked() {
  constexpr std::ptrdiff_t kOwnFiles = 5;  // the standard ones, the line, and the folder that is read
  return count_entries("/proc/self/task") == 1 && count_entries("/proc/self/fd") == kOwnFiles;
}

/// The server's life. Returns in the processes that it forks.
ForkRequest serve(int socket, pid_t launcher) {
  if (!can_be_forked()) ::_exit(1);
  ::prctl(PR_SET_NAME, "lockstep-fork");
  if (!send_pid(socket, kReady)) ::_exit(1);
  while (true) {
    std::vector<int> descriptors;
    auto request = receive_request(socket, descriptors);
    const bool has_cgroup = request && descriptors.size() > kFirstTarget + request->targets.size();
    const pid_t child = request ? fork_for_launcher(has_cgroup ? descriptors.back() : -1) : -1;
    if (child == 0) {
      become_forked(*request, descriptors, launcher);
      return std::move(*request);
    }
    for (int fd : descriptors) ::close(fd);
    if (!send_pid(socket, child)) ::_exit(1);
  }
}

/// Has /proc/PID/environ show what it would after execve(2): the memory in which the kernel put the first environment. What the process
/// has in common with the server stays where it is, for libraries may have kept pointers to it; the rest goes where the room is.
void show_environment(const std::vector<std::string>& environment) {
  std::ifstream stat("/proc/self/stat");
  std::string text;
  std::getline(stat, text);
  std::istringstream fields(text.substr(std::min(text.rfind(')'), text.size())));
  std::string skipped;
  for (int field = 2; field < 50; ++field)
    fields >> skipped;  // proc(5): env_start and env_end are the fields 50 and 51
  uintptr_t begin = 0;
  uintptr_t end = 0;
  if (!(fields >> begin >> end)) return;
  std::set<std::string_view> missing(environment.begin(), environment.end());
  char* room = nullptr;
  for (char* at = reinterpret_cast<char*>(begin); at < reinterpret_cast<char*>(end);) {
    const std::string_view variable(at);
    if (variable.starts_with(kRoom)) room = at;
    char* const next = at + variable.size() + 1;
    if (missing.erase(variable) == 0) std::memset(at, 0, variable.size());
    at = next;
  }
  if (room == nullptr) return;
  for (const std::string_view variable : missing) {  // the launcher has seen to it that they fit
    std::memcpy(room, variable.data(), variable.size());
    room += variable.size() + 1;
  }
}

/// A forked process has its request here. It is never destroyed, since the environment lies in it.
ForkRequest* own_request = nullptr;

/// The processes of a program that was started as a server begin here: the libraries are loaded, and nothing of the program
/// has run.
__attribute__((constructor)) void serve_where_asked() {
  const char* text = ::secure_getenv(ForkServer::kVariable);
  if (text == nullptr) return;
  const std::string_view words(text);
  const size_t colon = std::min(words.find(':'), words.size());
  const auto launcher = parse_number<pid_t>(std::string(words.substr(0, colon)));
  const auto socket = parse_number<int>(std::string(words.substr(std::min(colon + 1, words.size()))));
  // A program that a server's process starts has the variable no more; this one has it from elsewhere.
  if (!launcher || !socket || *launcher != ::getppid()) return;
  const char* name = ::program_invocation_short_name;
  own_request = new ForkRequest(serve(*socket, *launcher));
  ::prctl(PR_SET_NAME, name);
  ::clearenv();
  for (std::string& variable : own_request->environment) ::putenv(variable.data());
  show_environment(own_request->environment);
}

}  // namespace

ForkServer::ForkServer(WorkerSpec program) {
  int ends[2] = {-1, -1};
  TORCH_CHECK_WITH(DistBackendError, ::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0,
                   "can't make the socket of a fork server: ", std::strerror(errno));
  line_.reset(ends[0]);
  const UniqueFd theirs(ends[1]);
  int size = static_cast<int>(kMostBytes);
  ::setsockopt(line_.get(), SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
  const std::string variable = std::string(kVariable) + "=";
  std::erase_if(program.environment, [&](const std::string& each) { return each.starts_with(variable); });
  environment_.insert(program.environment.begin(), program.environment.end());
  program.environment.push_back(variable + std::to_string(::getpid()) + ":" + std::to_string(theirs.get()));
  program.environment.push_back(std::string(kRoom) + std::string(kRoomBytes, '-'));
  program.inherited.push_back(theirs.get());
  program.cgroup = -1;
  // The loader and the libraries write warnings to this process's standard error.
  const UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
  program.standard = {nothing.get(), nothing.get(), -1};
  process_.emplace(WorkerProcess::start(program, nullptr));
}

bool ForkServer::await(const Deadline& deadline) {
  if (ready_ || has_ended()) return ready_;
  const auto said = receive_pid(line_.get(), deadline);
  ready_ = said && *said == kReady;
  if (!ready_ && !deadline.expired()) end();  // it has closed the line
  return ready_;
}

bool ForkServer::has_ended() {
  if (process_ && process_->wait_status()) end();
  return !process_;
}

void ForkServer::end() {
  process_.reset();
  ready_ = false;
}

std::optional<MadeProcess> ForkServer::fork(const WorkerSpec& spec) {
  if (!await(Deadline::after(kForkTimeout))) return std::nullopt;
  size_t own_bytes = 0;
  for (const std::string& variable : spec.environment)
    if (environment_.count(variable) == 0) own_bytes += variable.size() + 1;
  if (own_bytes > kRoomBytes) return std::nullopt;
  ForkRequest request = {spec.arguments, spec.environment, {}};
  int go[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, go) != 0) return std::nullopt;
  const UniqueFd go_out(go[0]);
  UniqueFd go_in(go[1]);
  const UniqueFd folder(::open(".", O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!folder) return std::nullopt;
  std::vector<int> descriptors = {go_out.get(), folder.get()};
  for (size_t target = 0; target < spec.standard.size(); ++target) {
    // What the server has as its own is another one than this process's.
    descriptors.push_back(spec.standard[target] >= 0 ? spec.standard[target] : static_cast<int>(target));
    request.targets.push_back(static_cast<int>(target));
  }
  for (int fd : spec.inherited) {
    descriptors.push_back(fd);
    request.targets.push_back(fd);
  }
  if (spec.cgroup >= 0) descriptors.push_back(spec.cgroup);
  // Meanwhile what ends in a process below this one leaves its children to this one, too.
  int reaps = 0;
  ::prctl(PR_GET_CHILD_SUBREAPER, &reaps);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  std::optional<pid_t> pid;
  if (send_request(line_.get(), request, descriptors)) {
    pid = receive_pid(line_.get(), Deadline::after(kForkTimeout));
    if (!pid) end();
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, reaps);
  if (!pid || *pid <= 0) return std::nullopt;
  ::setpgid(*pid, *pid);  // the process does it too; the first of both counts
  return MadeProcess{*pid, std::move(go_in)};
}

const std::vector<std::string>* forked_arguments() {
  return own_request != nullptr ? &own_request->arguments : nullptr;
}

}  // namespace lockstep::launch
