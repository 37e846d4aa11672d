#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sys/types.h>
#include <utility>
#include <vector>

#include <lockstep/monitor/host_report.h>
#include <lockstep/monitor/internal/host_counters.h>

namespace lockstep::transport {
struct RankMemory;
}

namespace lockstep::monitor {

class Nvml;

/// The ranks of a job on this host, and what tells it from other jobs.
struct LocalJob {
  HostReport report;
  /// By its process, each rank's line: that process, and those that it descends from, as its launcher and the shell above.
  std::map<pid_t, std::set<pid_t>> lines;

  /// Whether it is one of them.
  bool has(pid_t pid) const;
};

/// Looks at this host: at all ranks that read_rank_memories() finds, at /proc, and at cards where NVIDIA's driver is.
/// What is counted a second, and processors' use, are means since the look before, so that the first one has none of
/// them. Used by one thread.
class HostSampler {
 public:
  HostSampler();
  ~HostSampler();

  /// By the jobs' first processes.
  std::vector<LocalJob> look();
  /// The host itself, without a job, as the last look has found it.
  const HostReport& host() const { return host_; }
  /// The processes with another version of Lockstep at the last look, of which nothing more is known.
  const std::vector<pid_t>& other_versions() const { return other_versions_; }

 private:
  /// What a rank had at the look before.
  struct Former {
    uint64_t started = 0;  // the process; another one may get its number
    uint64_t cpu_ticks = 0;
    uint64_t steps = 0;
    uint64_t samples = 0;
    int64_t step_began_ns = 0;
    std::optional<double> samples_per_second = {};
  };
  void look_at_host(double seconds);
  RankReport report_of(const transport::RankMemory& memory, double seconds);

  std::unique_ptr<Nvml> nvml_;
  HostReport host_;
  internal::HostCounters counters_;
  std::chrono::steady_clock::time_point looked_at_;
  bool looked_ = false;
  std::map<pid_t, Former> former_;
  std::map<pid_t, Former> present_;
  std::map<int, std::vector<pid_t>> on_card_;  // of the present look
  std::map<std::pair<int, pid_t>, std::optional<int64_t>> card_memory_;
  std::vector<pid_t> other_versions_;
};

}  // namespace lockstep::monitor
