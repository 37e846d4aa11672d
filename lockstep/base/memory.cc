#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <sstream>

#include <c10/util/Exception.h>

#include <lockstep/base/memory.h>

namespace lockstep {
namespace {

/// The number in a file such as memory.max; nothing for "max" or a file that isn't there.
int64_t read_number(const std::string& path, int64_t otherwise) {
  std::ifstream file(path);
  int64_t number = 0;
  return file >> number ? number : otherwise;
}

/// Bytes left below the limits of this process's control group and its ancestors (version 2, then version 1).
int64_t read_cgroup_left() {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  int64_t left = kNone;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    std::string root;
    const char* limit_name = nullptr;
    const char* usage_name = nullptr;
    if (line.rfind("0::", 0) == 0) {
      root = "/sys/fs/cgroup", limit_name = "/memory.max", usage_name = "/memory.current";
    } else if (line.find(":memory:") != std::string::npos) {
      root = "/sys/fs/cgroup/memory", limit_name = "/memory.limit_in_bytes",
      usage_name = "/memory.usage_in_bytes";
    } else {
      continue;
    }
    std::string path = line.substr(line.rfind(':') + 1);
    while (true) {
      const std::string folder = root + (path == "/" ? "" : path);
      const int64_t limit = read_number(folder + limit_name, kNone);
      if (limit != kNone) left = std::min(left, limit - read_number(folder + usage_name, 0));
      const auto slash = path.rfind('/');
      if (path.empty() || slash == std::string::npos) break;
      path.resize(slash);
    }
  }
  return std::max<int64_t>(left, 0);
}

}  // namespace

MemoryLimits read_memory_limits() {
  MemoryLimits limits;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t kibibytes = 0;
    if (words >> name >> kibibytes && name == "MemAvailable:") limits.available = kibibytes * 1024;
  }
  limits.cgroup_left = read_cgroup_left();
  return limits;
}

void check_memory_available(int64_t bytes, std::string_view purpose) {
  // What is left for everybody else: a machine that is filled to the last page is of no use to a training
  // run.
  constexpr int64_t kReserve = 64 << 20;
  const MemoryLimits limits = read_memory_limits();
  const int64_t room = std::min(limits.available, limits.cgroup_left);
  TORCH_CHECK_WITH(OutOfMemoryError, bytes + kReserve <= room, purpose, " needs ", format_bytes(bytes),
                   " of shared memory, but only ", format_bytes(room), " are left (",
                   limits.available <= limits.cgroup_left ? "MemAvailable" : "the control group's limit",
                   "); use fewer ranks on this host, a smaller model or a machine with more memory");
}

std::string format_bytes(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text.data();
}

}  // namespace lockstep
