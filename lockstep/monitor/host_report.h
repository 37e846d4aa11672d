#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

/// How a job's ranks and hosts do, for people who look at it from outside: `lockstep top`.
namespace lockstep::monitor {

/// A rank at one moment. What is not known is left out.
struct RankReport {
  int rank = 0;
  int world_size = 0;
  pid_t pid = 0;
  std::optional<int64_t> step = {};  ///< as the training loop counts; else those that the process has begun
  std::optional<double> step_seconds = {};  ///< the median of the last 20
  std::optional<double> samples_per_second = {};
  std::optional<double> loss = {};
  std::string phase = {};                    ///< "data", "forward", …; empty before the first step
  std::optional<double> phase_seconds = {};  ///< how long it has lasted
  bool stopped = false;                      ///< by a signal or a debugger
  std::vector<int> waits_for = {};           ///< ranks, in waits that have lasted long enough to sleep
  std::optional<double> cpu_percent = {};    ///< of one core
  int64_t memory = 0;                        ///< bytes that are resident, shared ones too
  std::vector<int> cards = {};               ///< by index, on which it computes
  std::optional<int64_t> card_memory = {};   ///< bytes, on all of them

  bool operator==(const RankReport&) const = default;
};

/// A process on one of the job's cards that is none of its ranks.
struct StrangerReport {
  pid_t pid = 0;
  std::string name = {};
  std::string user = {};
  std::optional<int64_t> memory = {};  ///< bytes of the card

  bool operator==(const StrangerReport&) const = default;
};

struct CardReport {
  int index = 0;
  std::string name = {};
  std::optional<int> used_percent = {};
  std::optional<int64_t> memory_used = {};  ///< bytes; nothing where the driver does not tell
  std::optional<int64_t> memory_total = {};
  std::vector<StrangerReport> others = {};

  bool operator==(const CardReport&) const = default;
};

/// A host, and the ranks of one job on it.
struct HostReport {
  std::string job = {};  ///< its id (TORCHELASTIC_RUN_ID, SLURM_JOB_ID); else the number of its first process
  std::string program = {};  ///< its words
  std::string host = {};
  int cores = 0;
  std::optional<double> cpu_percent = {};  ///< of all cores
  int64_t memory_used = 0;                 ///< bytes; of a control group with a limit, its own
  int64_t memory_total = 0;
  std::optional<double> received_per_second = {};  ///< bytes, by all interfaces but loopback
  std::optional<double> sent_per_second = {};
  std::vector<CardReport> cards = {};
  std::vector<RankReport> ranks = {};  ///< sorted
  uint64_t generation = 0;  ///< the newest that the agent knows of; 0: none has begun, or there is no agent
  bool idles = false;  ///< it is to run no ranks for now: the next one is formed, or that one runs without it

  bool operator==(const HostReport&) const = default;
};

/// One line. A loss that is no number stands as "nan", "inf" or "-inf", for JSON has no such numbers.
std::string to_json(const HostReport& report);
/// Nothing for a text that is no report.
std::optional<HostReport> parse_host_report(std::string_view text);

}  // namespace lockstep::monitor
