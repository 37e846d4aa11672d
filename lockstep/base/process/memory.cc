#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/base/files/kernel_file.h>
#include <lockstep/base/process/cgroup_folders.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/base/text/formatted.h>

namespace lockstep {
namespace {

constexpr int64_t kNone = MemoryLimits::kNone;

/// The number in a file such as memory.max; kNone for "max", for what version 1 writes instead (a huge
/// number), and for a file that isn't there.
int64_t read_limit(const std::string& path) {
  const auto number = read_kernel_integer(path);
  return number && *number <= (int64_t{1} << 60) ? *number : kNone;
}

/// What a control group of version 2 or 1 uses, less what the kernel takes back when memory is wanted: the page
/// cache of files, and what version 2 counts of their names and inodes, much where a data set has many. Shared memory,
/// which the kernel counts as cache, too, is not on the lists of files.
int64_t read_usage(const std::string& folder, bool version_2) {
  int64_t usage =
      read_kernel_integer(folder + (version_2 ? "/memory.current" : "/memory.usage_in_bytes")).value_or(0);
  std::ifstream statistics(folder + "/memory.stat");
  std::string name;
  for (int64_t bytes = 0; statistics >> name >> bytes;) {
    // Version 1 counts a group's children under total_ only.
    if (name == (version_2 ? "inactive_file" : "total_inactive_file") ||
        name == (version_2 ? "active_file" : "total_active_file") ||
        (version_2 && name == "slab_reclaimable")) {
      usage -= bytes;
    }
  }
  return std::max<int64_t>(usage, 0);
}

/// Narrows the limits to those of a control group of version 2 or 1.
void read_control_group(const std::string& folder, bool version_2, MemoryLimits& limits) {
  const int64_t limit = read_limit(folder + (version_2 ? "/memory.max" : "/memory.limit_in_bytes"));
  if (limit == kNone) return;
  limits.cgroup_limit = std::min(limits.cgroup_limit, limit);
  limits.cgroup_left =
      std::min(limits.cgroup_left, std::max<int64_t>(limit - read_usage(folder, version_2), 0));
}

}  // namespace

MemoryLimits read_memory_limits(const std::string& root) {
  MemoryLimits limits;
  std::ifstream meminfo(root + "/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t kibibytes = 0;
    if (words >> name >> kibibytes && name == "MemAvailable:") limits.available = kibibytes * 1024;
  }
  const CgroupFolders groups = own_cgroup_folders("memory", root);
  for (const auto& folder : groups.version_2) read_control_group(folder, true, limits);
  for (const auto& folder : groups.version_1) read_control_group(folder, false, limits);
  return limits;
}

void check_memory_available(int64_t bytes, std::string_view purpose) {
  // A machine that is filled to the last page is of no use to a training run.
  constexpr int64_t kReserve = 64 << 20;
  const MemoryLimits limits = read_memory_limits();
  const int64_t room = std::min(limits.available, limits.cgroup_left);
  TORCH_CHECK_WITH(OutOfMemoryError, bytes + kReserve <= room, purpose, " needs ", format_bytes(bytes),
                   " of shared memory, but only ", format_bytes(room), " are left (",
                   limits.available <= limits.cgroup_left ? "MemAvailable" : "the control group's limit",
                   "); use fewer ranks on this host, a smaller model or a machine with more memory");
}

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::string format_bytes(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return formatted(unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
}

}  // namespace lockstep
