#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <sys/types.h>

namespace lockstep {

/// What /proc/PID/stat says of a process.
struct ProcessStat {
  std::string name;
  char state = '?';  ///< 'Z': it has ended, but its parent has not asked how; 'T', 't': it is stopped
  pid_t parent = 0;
  uint64_t cpu_ticks = 0;       ///< clock ticks of processor time, the kernel's for it among them
  uint64_t start = 0;           ///< in clock ticks since the boot
  uint64_t resident_pages = 0;  ///< pages of memory, shared ones too
  int exit_code = 0;            ///< the wait status of one that has ended, for processes of the same user

  bool is_stopped() const { return state == 'T' || state == 't'; }
};

/// Nothing, and errno, when it can't be read; ENOENT or ESRCH: there is no such process.
std::optional<ProcessStat> read_process_stat(pid_t pid);

}  // namespace lockstep
