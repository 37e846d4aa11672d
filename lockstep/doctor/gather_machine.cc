#include <charconv>
#include <filesystem>
#include <set>
#include <sstream>
#include <sys/statvfs.h>
#include <system_error>

#include <lockstep/base/files/kernel_file.h>
#include <lockstep/base/process/cgroup_folders.h>
#include <lockstep/base/process/cpu_list.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/device/nvidia_devices.h>
#include <lockstep/doctor/gather.h>
#include <lockstep/doctor/internal/files.h>

namespace lockstep::doctor {

using internal::list_folder;

namespace {

Kernel gather_kernel(const std::string& root) {
  Kernel kernel;
  kernel.release = read_kernel_file(root + "/proc/sys/kernel/osrelease").value_or("");
  const char* end = kernel.release.data() + kernel.release.size();
  auto [stop, error] = std::from_chars(kernel.release.data(), end, kernel.major);
  if (error == std::errc() && stop != end) std::from_chars(stop + 1, end, kernel.minor);
  kernel.clock_source =
      read_kernel_file(root + "/sys/devices/system/clocksource/clocksource0/current_clocksource")
          .value_or("");
  if (const auto scope = read_kernel_integer(root + "/proc/sys/kernel/yama/ptrace_scope")) {
    kernel.ptrace_scope = static_cast<int>(*scope);
  }
  return kernel;
}

template <typename Number>
void keep_smaller(std::optional<Number>& kept, std::optional<Number> other) {
  if (other && (!kept || *other < *kept)) kept = other;
}

std::optional<double> quota_of(const std::string& folder, bool version_2) {
  int64_t quota = -1;
  int64_t period = 0;
  if (version_2) {
    std::istringstream words(read_kernel_file(folder + "/cpu.max").value_or(""));
    if (!(words >> quota >> period)) return std::nullopt;  // "max 100000"
  } else {
    quota = read_kernel_integer(folder + "/cpu.cfs_quota_us").value_or(-1);
    period = read_kernel_integer(folder + "/cpu.cfs_period_us").value_or(0);
  }
  if (quota <= 0 || period <= 0) return std::nullopt;
  return static_cast<double>(quota) / static_cast<double>(period);
}

/// The value after "NAME:" in a file of such lines.
std::optional<std::string> field(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name + ":")) continue;
    const auto begin = line.find_first_not_of(" \t", name.size() + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return std::nullopt;
}

Cores gather_cores(const std::string& root) {
  const std::string folder = root + "/sys/devices/system/";
  Cores cores;
  cores.online = parse_cpu_list(read_kernel_file(folder + "cpu/online").value_or(""));
  const std::string status = read_kernel_file(root + "/proc/self/status").value_or("");
  cores.allowed = parse_cpu_list(field(status, "Cpus_allowed_list").value_or(""));
  const CgroupFolders groups = own_cgroup_folders("cpu", root);
  for (const auto& group : groups.version_2) keep_smaller(cores.quota, quota_of(group, true));
  for (const auto& group : groups.version_1) keep_smaller(cores.quota, quota_of(group, false));
  for (int node : parse_cpu_list(read_kernel_file(folder + "node/online").value_or(""))) {
    auto members = parse_cpu_list(
        read_kernel_file(folder + "node/node" + std::to_string(node) + "/cpulist").value_or(""));
    if (!members.empty()) cores.numa_nodes.push_back(std::move(members));
  }
  if (const auto active = read_kernel_integer(folder + "cpu/smt/active")) cores.smt_active = *active != 0;
  std::set<std::string> siblings;
  for (int core : cores.online) {
    const auto list =
        read_kernel_file(folder + "cpu/cpu" + std::to_string(core) + "/topology/thread_siblings_list");
    if (list) siblings.insert(*list);
  }
  cores.physical = static_cast<int>(siblings.size());
  return cores;
}

Memory gather_memory(const std::string& root) {
  Memory memory;
  const std::string meminfo = read_kernel_file(root + "/proc/meminfo").value_or("");
  const auto bytes = [&](const char* name) {
    int64_t kibibytes = 0;
    std::istringstream(field(meminfo, name).value_or("0")) >> kibibytes;
    return kibibytes * 1024;
  };
  memory.total = bytes("MemTotal");
  memory.available = bytes("MemAvailable");
  const MemoryLimits limits = read_memory_limits(root);
  if (limits.cgroup_limit != MemoryLimits::kNone) {
    memory.cgroup_limit = limits.cgroup_limit;
    memory.cgroup_left = limits.cgroup_left;
  }
  return memory;
}

/// A line of /proc/self/limits: the name, then the soft and the hard value, "unlimited" or a number.
Limit limit_of(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name)) continue;
    std::istringstream words(line.substr(name.size()));
    std::string soft;
    std::string hard;
    words >> soft >> hard;
    return {parse_number<int64_t>(soft), parse_number<int64_t>(hard)};
  }
  return {};
}

Limits gather_limits(const std::string& root) {
  Limits limits;
  const auto text = read_kernel_file(root + "/proc/self/limits");
  limits.known = text.has_value();
  limits.open_files = limit_of(text.value_or(""), "Max open files");
  limits.locked_memory = limit_of(text.value_or(""), "Max locked memory");
  limits.processes = limit_of(text.value_or(""), "Max processes");
  limits.address_space = limit_of(text.value_or(""), "Max address space");
  const CgroupFolders groups = own_cgroup_folders("pids", root);
  for (const auto* folders : {&groups.version_2, &groups.version_1}) {
    for (const auto& group : *folders)
      keep_smaller(limits.pids_max, read_kernel_integer(group + "/pids.max"));
  }
  return limits;
}

DevShm gather_dev_shm(const std::string& root) {
  DevShm shm;
  struct statvfs status {};
  const std::string path = root + "/dev/shm";
  shm.mounted = ::statvfs(path.c_str(), &status) == 0;
  if (!shm.mounted) return shm;
  shm.size = static_cast<int64_t>(status.f_blocks * status.f_frsize);
  shm.free = static_cast<int64_t>(status.f_bavail * status.f_frsize);
  return shm;
}

Gpu gather_gpu_files(const std::string& root) {
  Gpu gpu;
  gpu.device_files = count_nvidia_cards(root + "/dev");
  std::error_code ignored;
  gpu.wsl_device = std::filesystem::exists(root + "/dev/dxg", ignored);
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue …": the first word that looks like one.
  std::istringstream words(read_kernel_file(root + "/proc/driver/nvidia/version").value_or(""));
  for (std::string word; gpu.driver.empty() && words >> word;) {
    const bool numeric = word.find_first_not_of("0123456789.") == std::string::npos;
    if (numeric && word.find('.') != std::string::npos) gpu.driver = word;
  }
  return gpu;
}

}  // namespace

Facts gather_machine(const std::string& root) {
  Facts facts;
  facts.kernel = gather_kernel(root);
  facts.cores = gather_cores(root);
  facts.memory = gather_memory(root);
  facts.limits = gather_limits(root);
  facts.dev_shm = gather_dev_shm(root);
  facts.gpu = gather_gpu_files(root);
  facts.ucx.rdma_hardware = list_folder(root + "/sys/class/infiniband");
  return facts;
}

}  // namespace lockstep::doctor
