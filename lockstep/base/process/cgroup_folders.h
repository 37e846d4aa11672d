#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// The folders of a process's cgroup: its own first, then those above it, as far as the hierarchy is mounted, whose limits
/// count for the process, too. Empty where the hierarchy is not mounted, or the cgroup lies outside of what is.
struct CgroupFolders {
  std::vector<std::string> version_2;
  std::vector<std::string> version_1;  ///< in the hierarchy of the controller
};

/// From the texts of /proc/PID/cgroup and /proc/PID/mountinfo (cgroups(7), proc_pid_mountinfo(5)). `controller`: of version
/// 1; "memory", say. Pure.
CgroupFolders cgroup_folders(std::string_view cgroups, std::string_view mounts, std::string_view controller);

/// The folders of this process. `root`: where /proc and /sys are, for tests.
CgroupFolders own_cgroup_folders(std::string_view controller, const std::string& root = "");

}  // namespace lockstep
