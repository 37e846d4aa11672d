#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/files/file_replacement.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/internal/job_file.h>
#include <lockstep/rendezvous/process_stat.h>

namespace lockstep::rendezvous_internal {
namespace {

/// The nearest ancestor that is an MPI launcher or its daemon on this host, as "pid.start"; "" without one,
/// as inside of a container that the launcher started.
std::string launcher_process() {
  static constexpr std::array kLaunchers = {
      "mpirun",        "mpiexec",      "orterun",         "orted",           "prterun",
      "prted",         "prte",         "mpiexec.hydra",   "hydra_pmi_proxy", "pmi_proxy",
      "mpiexec.mpich", "mpirun.mpich", "mpiexec.openmpi", "mpirun.openmpi"};
  auto process = read_process_stat(::getpid());
  for (int depth = 0; process && process->parent > 0 && depth < 64; ++depth) {
    const pid_t pid = process->parent;
    process = read_process_stat(pid);
    if (!process) break;
    bool launcher = std::find(kLaunchers.begin(), kLaunchers.end(), process->name) != kLaunchers.end();
    if (launcher) return std::to_string(pid) + "." + std::to_string(process->start);
  }
  return "";
}

/// FNV-1a, 64 bits. Only tells names apart; the directory keeps other users out.
std::string hash(const std::string& text) {
  uint64_t value = 0xcbf29ce484222325;
  for (unsigned char c : text) value = (value ^ c) * 0x100000001b3;
  std::array<char, 16> digits{};
  auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value, 16).ptr;
  return {digits.data(), end};
}

/// A directory of this user's own, which no other user can enter; all users share /tmp itself.
std::string private_directory() {
  std::vector<std::string> parents = {"/dev/shm", "/tmp"};
  if (auto chosen = environment::text("TMPDIR")) parents.insert(parents.begin(), *chosen);
  std::string tried;
  for (const auto& parent : parents) {
    auto path = parent + "/lockstep-" + std::to_string(::geteuid());
    struct stat status {};
    bool there = ::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST;
    if (!there) {
      tried += "; " + path + ": " + std::strerror(errno);
    } else if (::lstat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) ||
               status.st_uid != ::geteuid() || (status.st_mode & 077) != 0) {
      tried += "; " + path + " is not a directory that only this user can enter";
    } else if (::access(path.c_str(), W_OK | X_OK) != 0) {
      tried += "; " + path + ": " + std::strerror(errno);
    } else {
      return path;
    }
  }
  C10_THROW_ERROR(DistStoreError, "no directory for the file at which this job's processes meet" + tried +
                                      "; set TMPDIR to a directory that can be written");
}

}  // namespace

JobFile JobFile::of_job(const std::string& job) {
  auto launcher = launcher_process();
  TORCH_CHECK_VALUE(
      !launcher.empty() || !job.empty(),
      "cannot tell this MPI job from others: its launcher sets no job id and is not among this process's "
      "ancestors; set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port");
  auto name = hash(this_host().boot_id + " " + launcher + " " + job);
  return JobFile(private_directory() + "/job-" + (launcher.empty() ? "" : launcher + "-") + name);
}

void JobFile::publish(uint16_t port) const {
  FileReplacement fresh(path_ + "." + std::to_string(::getpid()));
  auto text = std::to_string(port) + "\n";
  ::unlink(fresh.name().c_str());  // left by a process that died while it wrote
  UniqueFd file(::open(fresh.name().c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  bool written = file && ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
                 fresh.commit(path_);
  if (!written) {
    const int error = errno;
    C10_THROW_ERROR(DistStoreError, c10::str("rank 0 cannot write ", path_,
                                             ", at which this job's processes meet: ", std::strerror(error),
                                             "; free some space, or set TMPDIR to another place"));
  }
}

std::optional<uint16_t> JobFile::read() const {
  UniqueFd file(::open(path_.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (!file) return std::nullopt;
  std::array<char, 16> text{};
  auto size = ::read(file.get(), text.data(), text.size());
  uint16_t port = 0;
  if (size <= 0 || std::from_chars(text.data(), text.data() + size, port).ec != std::errc())
    return std::nullopt;
  return port;
}

void JobFile::remove() const {
  ::unlink(path_.c_str());
}

}  // namespace lockstep::rendezvous_internal
