#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <filesystem>
#include <iterator>
#include <poll.h>
#include <string_view>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>
#include <climits>

#include <lockstep/base/text/parse_number.h>
#include <lockstep/launch/fork_server.h>

namespace lockstep::launch {
namespace {

constexpr size_t kMostDescriptors = 16;
constexpr size_t kMostBytes = 1 << 20;
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

union ControlBuffer {
  char bytes[CMSG_SPACE(kMostDescriptors * sizeof(int))];
  cmsghdr align;
};

bool send_request(int socket, const ForkRequest& request, const std::vector<int>& descriptors) {
  std::string bytes = request.bytes();
  if (bytes.size() > kMostBytes || descriptors.size() > kMostDescriptors) return false;
  iovec part = {bytes.data(), bytes.size()};
  ControlBuffer control = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  ssize_t sent = 0;
  while ((sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT)) < 0 && errno == EINTR) {
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

/// Of a process that was forked; it is never destroyed, since the environment lies in it.
ForkRequest* own_request = nullptr;

/// Of a program that was started as a server, this is where its processes begin: the libraries are loaded, and nothing of the
/// program has run.
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
}

// ---- of programs

/// The loader that the kernel starts the executable with; empty where it needs none, is no 64-bit ELF file, or has privileges, with
/// which a loader reads other variables.
std::string loader_of(const std::string& program) {
  const UniqueFd file(::open(program.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0 || (status.st_mode & (S_ISUID | S_ISGID)) != 0 ||
      ::fgetxattr(file.get(), "security.capability", nullptr, 0) > 0) {
    return {};
  }
  Elf64_Ehdr header = {};
  const auto read_at = [&](void* to, size_t size, size_t offset) {
    return ::pread(file.get(), to, size, static_cast<off_t>(offset)) == static_cast<ssize_t>(size);
  };
  if (!read_at(&header, sizeof(header), 0) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_ident[EI_CLASS] != ELFCLASS64) {
    return {};
  }
  for (size_t i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr part = {};
    if (!read_at(&part, sizeof(part), header.e_phoff + i * header.e_phentsize)) return {};
    if (part.p_type != PT_INTERP) continue;
    std::string path(std::min<size_t>(part.p_filesz, PATH_MAX), '\0');
    return read_at(path.data(), path.size(), part.p_offset) ? path.c_str() : std::string();
  }
  return {};
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
  program.environment.push_back(variable + std::to_string(::getpid()) + ":" + std::to_string(theirs.get()));
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

bool links_this_library(const std::string& program, const std::vector<std::string>& environment) {
  const std::string loader = loader_of(program);
  // Another one might run the program.
  if (!std::filesystem::path(loader).filename().string().starts_with("ld-linux")) return false;
  struct stat own = {};
  Dl_info library = {};
  if (::dladdr(reinterpret_cast<const void*>(&links_this_library), &library) == 0 ||
      ::stat(library.dli_fname, &own) != 0) {
    return false;
  }
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) return false;
  const UniqueFd in(ends[0]);
  UniqueFd out(ends[1]);
  const UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
  std::optional<WorkerProcess> process;
  try {
    process.emplace(WorkerProcess::start({.program = loader,
                                          .arguments = {loader, "--list", program},
                                          .environment = environment,
                                          .standard = {nothing.get(), out.get(), nothing.get()}},
                                         nullptr));
  } catch (const c10::DistBackendError&) {  // the program itself may be started, by binfmt_misc for example
    return false;
  }
  out.reset();
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::read(in.get(), buffer, sizeof(buffer))) > 0 || (got < 0 && errno == EINTR);)
    if (got > 0) text.append(buffer, static_cast<size_t>(got));
  process.reset();
  // Lines such as "\tliblockstep.so => /usr/lib/liblockstep.so (0x00007f91e0200000)".
  constexpr std::string_view kArrow = " => ";
  for (size_t begin = 0; (begin = text.find(kArrow, begin)) != std::string::npos;) {
    begin += kArrow.size();
    const size_t end = std::min(text.find(" (0x", begin), text.size());
    struct stat listed = {};
    if (::stat(text.substr(begin, end - begin).c_str(), &listed) == 0 && listed.st_dev == own.st_dev &&
        listed.st_ino == own.st_ino) {
      return true;
    }
    begin = end;
  }
  return false;
}

}  // namespace lockstep::launch
