#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <utility>

#include <lockstep/base/unique_fd.h>

namespace lockstep::launch {

/// The process that the kernel has killed for want of memory, and what it says of it, by a record of /dev/kmsg; nothing
/// where the record tells of something else. Pure.
std::optional<std::pair<pid_t, std::string>> victim_of_record(std::string_view record);

/// The number behind "oom_kill", in memory.events of cgroup v2 and memory.oom_control of v1. Pure.
std::optional<uint64_t> oom_kills_in(std::string_view text);

/// Tells workers that the kernel has killed for want of memory from those that something else has killed: by the kernel's
/// log, which names the process, where it can be read; otherwise by the counter of the workers' cgroup, which a container
/// can read, too. What was before this object was made does not count. Not thread-safe.
class OutOfMemoryWatch {
 public:
  /// `workers`: the folder of their cgroup of version 2, if they have one of their own; else "".
  explicit OutOfMemoryWatch(const std::string& workers);

  /// What shows that this process, which SIGKILL has ended, was killed by the kernel; empty where nothing does. To be called
  /// once for each.
  std::string evidence_of(pid_t pid);

 private:
  void read_log();

  UniqueFd log_;  // where its pids are those of this process
  std::map<pid_t, std::string> victims_;
  std::string counter_;  // its file; empty: none
  uint64_t kills_ = 0;   // that were there at the start, or have been evidence
};

}  // namespace lockstep::launch
