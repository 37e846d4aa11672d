#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <sys/types.h>
#include <vector>

namespace lockstep::monitor::internal {

/// What the kernel counts for this host since it was booted.
struct HostCounters {
  uint64_t cpu_busy = 0;  ///< clock ticks of all cores
  uint64_t cpu_all = 0;
  uint64_t received = 0;  ///< bytes, by all interfaces but loopback
  uint64_t sent = 0;
};
HostCounters read_host_counters();

/// Bytes: of the host, or of a control group that limits this process to less.
struct HostMemory {
  int64_t used = 0;
  int64_t total = 0;
};
HostMemory read_host_memory();

/// The environment with which a process of this user was started; empty where it can't be read.
std::map<std::string, std::string> environment_of(pid_t pid);
/// The words of its command line.
std::vector<std::string> words_of(pid_t pid);
/// The name of the user that a process belongs to, or the user's number; empty where there is no such process.
std::string user_of(pid_t pid);

}  // namespace lockstep::monitor::internal
