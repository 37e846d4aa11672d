#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/doctor/finding.h>
#include <lockstep/doctor/job_probe.h>
#include <lockstep/doctor/rank_facts.h>

/// What was seen in a job, and what it means. Plain values and pure functions.
namespace lockstep::doctor {

namespace thresholds {
/// A pair is slow when one of its two medians is more than so many times the median of all pairs, of those within hosts
/// or of those between them …
constexpr double kSlowFactor = 3;
/// … and so many seconds more, for latencies vary by microseconds where ranks share cores.
constexpr double kSlowSeconds = 200e-6;
/// Fewer pairs than this have no median to speak of.
constexpr size_t kPairsToCompare = 3;
constexpr double kClockSeconds = 0.1;  ///< wall clocks further apart are pointed out
}  // namespace thresholds

/// All that was seen of one pair in all sweeps.
struct PairResult {
  Pair ranks;
  std::map<int, std::string> errors;  ///< by the rank that had it
  std::vector<double> latencies;      ///< seconds; the slower of both ranks, one for each sweep
  std::vector<double> transfers;
};

struct JobObservations {
  std::vector<std::optional<RankFacts>> ranks;  ///< nothing: it did not answer, or not so as to be understood
  std::map<int, std::string> gone;              ///< ranks that ended or stopped answering: "ended during …"
  std::map<int, std::string> join_errors;
  std::map<int, std::string> all_errors;  ///< of the operations over all ranks
  std::map<int, double> clock_offsets;    ///< seconds, against rank 0
  std::vector<PairResult> pairs;          ///< those that were tested
};

/// The order is that of the report: the ranks, what differs, what fails, what is slow.
Findings judge_job(const JobObservations& job);

// Its parts, by file.
Findings judge_ranks(const JobObservations& job);  // hosts, versions, cores, devices, variables, clocks
Findings judge_communication(const JobObservations& job);  // joining, operations, pairs

}  // namespace lockstep::doctor
