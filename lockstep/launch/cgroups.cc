#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <ctime>
#include <dirent.h>
#include <fcntl.h>
#include <filesystem>
#include <stdlib.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <lockstep/base/files/kernel_file.h>
#include <lockstep/base/process/cgroup_folders.h>
#include <lockstep/launch/cgroups.h>
#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/process_stat.h>

namespace lockstep::launch {
namespace {

/// Removes the cgroups below this one that have no processes: a worker may be a launcher, too. Without readdir(3), which
/// allocates.
void remove_cgroups_below(int folder) {
  alignas(dirent64) std::array<char, 4096> entries;
  for (ssize_t got = 0; (got = ::getdents64(folder, entries.data(), entries.size())) > 0;) {
    for (ssize_t at = 0; at < got;) {
      const auto* entry = reinterpret_cast<const dirent64*>(entries.data() + at);
      at += entry->d_reclen;
      if (entry->d_type != DT_DIR || entry->d_name[0] == '.') continue;
      const UniqueFd below(::openat(folder, entry->d_name, O_DIRECTORY | O_RDONLY | O_CLOEXEC));
      if (below) remove_cgroups_below(below.get());
      ::unlinkat(folder, entry->d_name, AT_REMOVEDIR);
    }
  }
}

// It follows processes that fork(3) starts, and no others.
#if defined(__SANITIZE_THREAD__)
constexpr bool kUnderThreadSanitizer = true;
#else
constexpr bool kUnderThreadSanitizer = false;
#endif

constexpr std::string_view kPrefix = "lockstep_";

/// "PID_START_NAMESPACE_" of a process, which no later process of this boot has: cgroups do not outlive it, either.
std::optional<std::string> mark_of_process(pid_t pid, uint64_t pid_namespace) {
  const auto stat = read_process_stat(pid);
  if (!stat || stat->state == 'Z') return std::nullopt;
  return std::to_string(pid) + "_" + std::to_string(stat->start) + "_" + std::to_string(pid_namespace) + "_";
}

/// Whether this is the name of a WorkerCgroup of a process of this namespace that has ended. Of others nothing can be said.
bool belongs_to_ended_process(std::string_view name, uint64_t pid_namespace) {
  if (!name.starts_with(kPrefix)) return false;
  name.remove_prefix(kPrefix.size());
  pid_t pid = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
  if (error != std::errc() || pid <= 0) return false;
  if (name.find("_" + std::to_string(pid_namespace) + "_") == std::string_view::npos) return false;
  const auto living = mark_of_process(pid, pid_namespace);
  return !living || !name.starts_with(*living);
}

void remove_leftovers(const std::string& parent, uint64_t pid_namespace) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(parent, ignored)) {
    if (!belongs_to_ended_process(entry.path().filename().string(), pid_namespace)) continue;
    const std::string events = read_kernel_file(entry.path() / "cgroup.events").value_or("");
    if (("\n" + events + "\n").find("\npopulated 0\n") == std::string::npos) continue;
    const UniqueFd opened(::open(entry.path().c_str(), O_DIRECTORY | O_RDONLY | O_CLOEXEC));
    if (opened) remove_cgroups_below(opened.get());
    ::rmdir(entry.path().c_str());  // the kernel refuses where a process has come meanwhile
  }
}

}  // namespace

void kill_cgroup(const char* kill_file) {
  const int file = ::open(kill_file, O_WRONLY | O_CLOEXEC);
  if (file < 0) return;
  [[maybe_unused]] const auto written = ::write(file, "1", 1);
  ::close(file);
}

void remove_cgroup(const char* folder) {
  constexpr timespec kPause = {0, 1'000'000};
  for (int i = 0; i < 5000 && ::rmdir(folder) != 0 && errno == EBUSY; ++i) {
    const UniqueFd opened(::open(folder, O_DIRECTORY | O_RDONLY | O_CLOEXEC));
    if (opened) remove_cgroups_below(opened.get());
    ::nanosleep(&kPause, nullptr);
  }
}

std::optional<WorkerCgroup> WorkerCgroup::make() {
  if (kUnderThreadSanitizer) return std::nullopt;
  const std::vector<std::string> parents = own_cgroup_folders("memory").version_2;
  const uint64_t pid_namespace = inode_of_namespace("/proc/self/ns/pid");
  const auto mark = mark_of_process(::getpid(), pid_namespace);
  if (parents.empty() || !mark) return std::nullopt;
  remove_leftovers(parents.front(), pid_namespace);
  std::string folder = parents.front() + "/" + std::string(kPrefix) + *mark + "XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return std::nullopt;
  UniqueFd fd(::open(folder.c_str(), O_DIRECTORY | O_RDONLY | O_CLOEXEC));
  WorkerCgroup cgroup(folder, std::move(fd));
  const bool can_kill = ::access((folder + "/cgroup.kill").c_str(), W_OK) == 0;
  if (!cgroup.fd_ || !can_kill) return std::nullopt;
  return cgroup;
}

WorkerCgroup::WorkerCgroup(WorkerCgroup&& other) noexcept
    : folder_(std::exchange(other.folder_, {})), fd_(std::move(other.fd_)) {}

WorkerCgroup::~WorkerCgroup() {
  if (folder_.empty()) return;
  kill();
  remove_cgroup(folder_.c_str());
}

void WorkerCgroup::kill() const {
  kill_cgroup((folder_ + "/cgroup.kill").c_str());
}

}  // namespace lockstep::launch
