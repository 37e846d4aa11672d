#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <utility>

#include <lockstep/base/unique_fd.h>

namespace lockstep::launch {

/// The process that the kernel has killed for want of memory, and what it says of it, by a record of /dev/kmsg; nothing
/// where the record tells of something else. Pure.
std::optional<std::pair<pid_t, std::string>> victim_of_record(std::string_view record);

/// The number after "oom_kill", in memory.events of cgroup v2 and memory.oom_control of v1. Pure.
std::optional<uint64_t> oom_kills_in(std::string_view text);

/// Which deaths a cgroup's counter of killed processes explains. It counts other processes of the cgroup, too, those that a
/// worker has started above all, and such a kill must not explain a worker's death of another cause later on. So one kill
/// explains one death, that of a worker whose end is noticed soon after it. Knows no clock.
class CountedKills {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::chrono::seconds kInterval{1};  // between looks
  static constexpr std::chrono::seconds kExplains{5};  // the kernel takes its time to end a large process

  explicit CountedKills(uint64_t at_start) : counted_(at_start) {}
  /// The counter as it is now, while no worker has ended.
  void look(uint64_t kills, Time now);
  /// The same where a worker's end is noticed now: whether a kill explains it, and then no other end.
  bool explain(uint64_t kills, Time now);

 private:
  struct Kills {
    Time seen;
    uint64_t kills;
  };
  uint64_t counted_;
  std::deque<Kills> fresh_;  // in the order of time; each has some
};

/// Tells workers that the kernel has killed for want of memory from those that something else has killed: by the kernel's
/// log, which names the process, where it can be read; otherwise by the counter of the workers' cgroup, which a container
/// can read, too. What was before this object was made does not count. Not thread-safe.
class OutOfMemoryWatch {
 public:
  /// `workers`: the folder of their cgroup of version 2, if they have one of their own; else "".
  explicit OutOfMemoryWatch(const std::string& workers);
  /// `log`: records of the kernel's log, one by each read(2), without waiting; empty: none that can be read. `counter`: the
  /// file that counts kills; "": none.
  OutOfMemoryWatch(UniqueFd log, const std::string& counter);

  /// To be called often while workers run; looks at the counter once a second.
  void look(CountedKills::Time now);
  /// SIGKILL has ended this process. To be called once for each, as soon as its end is noticed: see CountedKills.
  void note_kill(pid_t pid, CountedKills::Time now);
  /// What shows that this process, of which note_kill() was told, was killed by the kernel; empty where nothing does. To be
  /// called late: the kernel writes its record only after the signal, when the process may have ended already.
  std::string evidence_of(pid_t pid);

 private:
  void read_log();

  UniqueFd log_;  // where its pids are those of this process
  bool log_has_gaps_ = false;
  std::map<pid_t, std::string> victims_;
  std::set<pid_t> counted_;  // those whose end the counter explains
  std::string counter_;      // its file; empty: none
  CountedKills kills_{0};
  CountedKills::Time look_at_ = {};
};

}  // namespace lockstep::launch
