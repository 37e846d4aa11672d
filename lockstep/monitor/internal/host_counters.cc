#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <pwd.h>
#include <sstream>
#include <sys/stat.h>

#include <lockstep/base/process/memory.h>
#include <lockstep/monitor/internal/host_counters.h>

namespace lockstep::monitor::internal {
namespace {

/// The pieces of a file of /proc that end with a zero byte.
std::vector<std::string> pieces_of(pid_t pid, const char* file) {
  std::ifstream stream("/proc/" + std::to_string(pid) + "/" + file);
  std::vector<std::string> pieces;
  for (std::string piece; std::getline(stream, piece, '\0');) pieces.push_back(piece);
  return pieces;
}

}  // namespace

HostCounters read_host_counters() {
  HostCounters counters;
  std::ifstream stat("/proc/stat");
  std::string word;
  stat >> word;
  constexpr int kIdle = 3, kWaitsForDisk = 4, kFields = 8;  // what follows is a part of the first ones
  for (int field = 0; field < kFields; ++field) {
    uint64_t ticks = 0;
    if (!(stat >> ticks)) break;
    counters.cpu_all += ticks;
    if (field != kIdle && field != kWaitsForDisk) counters.cpu_busy += ticks;
  }
  std::ifstream interfaces("/proc/net/dev");
  for (std::string line; std::getline(interfaces, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;  // a heading
    const size_t begin = line.find_first_not_of(' ');
    if (line.substr(begin, colon - begin) == "lo") continue;
    std::istringstream fields(line.substr(colon + 1));
    constexpr int kSent = 8;
    uint64_t bytes = 0;
    for (int field = 0; field <= kSent && fields >> bytes; ++field) {
      if (field == 0) counters.received += bytes;
      if (field == kSent) counters.sent += bytes;
    }
  }
  return counters;
}

HostMemory read_host_memory() {
  int64_t total = 0;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string word; meminfo >> word && word != "MemTotal:";) {
  }
  meminfo >> total;
  total <<= 10;
  const MemoryLimits limits = read_memory_limits();
  HostMemory memory{.total = std::min(total, limits.cgroup_limit)};
  memory.used =
      memory.total - std::clamp<int64_t>(std::min(limits.available, limits.cgroup_left), 0, memory.total);
  return memory;
}

std::map<std::string, std::string> environment_of(pid_t pid) {
  std::map<std::string, std::string> variables;
  for (const std::string& piece : pieces_of(pid, "environ")) {
    const size_t equals = piece.find('=');
    if (equals != std::string::npos) variables.emplace(piece.substr(0, equals), piece.substr(equals + 1));
  }
  return variables;
}

std::vector<std::string> words_of(pid_t pid) {
  return pieces_of(pid, "cmdline");
}

std::string user_of(pid_t pid) {
  struct stat status {};
  if (::stat(("/proc/" + std::to_string(pid)).c_str(), &status) != 0) return {};
  std::array<char, 4096> buffer{};
  passwd entry{};
  passwd* found = nullptr;
  if (::getpwuid_r(status.st_uid, &entry, buffer.data(), buffer.size(), &found) == 0 && found != nullptr)
    return entry.pw_name;
  return std::to_string(status.st_uid);
}

}  // namespace lockstep::monitor::internal
