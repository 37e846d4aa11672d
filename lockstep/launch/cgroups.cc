#include <array>
#include <cerrno>
#include <ctime>
#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <lockstep/base/process/cgroup_folders.h>
#include <lockstep/launch/cgroups.h>

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
#if defined(__SANITIZE_THREAD__)
  return std::nullopt;  // ThreadSanitizer follows processes that fork(3) starts, and no others
#else
  const std::vector<std::string> parents = own_cgroup_folders("memory").version_2;
  if (parents.empty()) return std::nullopt;
  std::string folder = parents.front() + "/lockstep_XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return std::nullopt;
  UniqueFd fd(::open(folder.c_str(), O_DIRECTORY | O_RDONLY | O_CLOEXEC));
  WorkerCgroup cgroup(folder, std::move(fd));
  const bool can_kill = ::access((folder + "/cgroup.kill").c_str(), W_OK) == 0;
  if (!cgroup.fd_ || !can_kill) return std::nullopt;
  return cgroup;
#endif
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
