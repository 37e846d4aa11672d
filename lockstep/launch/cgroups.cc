#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <dirent.h>
#include <fcntl.h>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdlib.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <lockstep/launch/cgroups.h>

namespace lockstep::launch {
namespace {

std::string text_of_file(const char* path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

/// Whether one of the words between commas is this.
bool lists(const std::string& words, const std::string& word) {
  std::istringstream stream(words);
  for (std::string each; std::getline(stream, each, ',');) {
    if (each == word) return true;
  }
  return false;
}

/// The path behind "ID:CONTROLLERS:" of the hierarchy; version 2 has the ID 0.
std::optional<std::string> path_in(std::string_view cgroups, bool unified) {
  std::istringstream lines{std::string(cgroups)};
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool found = unified ? line.starts_with("0::") : lists(controllers, "memory");
    if (found) return line.substr(second + 1);
  }
  return std::nullopt;
}

std::string folder_of(std::string_view cgroups, std::string_view mounts, bool unified) {
  const auto path = path_in(cgroups, unified);
  if (!path || !path->starts_with("/") || path->starts_with("/.."))
    return {};  // outside of what is mounted here
  std::istringstream lines{std::string(mounts)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream stream(line);
    const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 6 || words.end() - dash < 4) continue;
    if (dash[1] != (unified ? "cgroup2" : "cgroup") || (!unified && !lists(dash[3], "memory"))) continue;
    const std::string& root = words[3];  // the part of the hierarchy that is mounted
    const std::string& point = words[4];
    if (root == "/") return *path == "/" ? point : point + *path;
    if (*path == root) return point;
    if (path->starts_with(root + "/")) return point + path->substr(root.size());
  }
  return {};
}

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

CgroupFolders cgroup_folders(std::string_view cgroups, std::string_view mounts) {
  return {folder_of(cgroups, mounts, true), folder_of(cgroups, mounts, false)};
}

CgroupFolders own_cgroup_folders() {
  return cgroup_folders(text_of_file("/proc/self/cgroup"), text_of_file("/proc/self/mountinfo"));
}

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
  const std::string parent = own_cgroup_folders().unified;
  std::string folder = parent + "/lockstep_XXXXXX";
  if (parent.empty() || ::mkdtemp(folder.data()) == nullptr) return std::nullopt;
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
