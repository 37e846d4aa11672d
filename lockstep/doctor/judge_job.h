#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
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
/// A wire loses what is sent when so large a part of the TCP segments, and at least so many, are sent again.
constexpr double kResentShare = 0.01;
constexpr int64_t kResentSegments = 10;
}  // namespace thresholds

/// All that was seen of one pair in all sweeps.
struct PairResult {
  Pair ranks;
  std::map<int, std::string> errors;  ///< by the rank that had it
  std::vector<double> latencies;      ///< seconds; the slower of both ranks, one for each sweep
  std::vector<double> transfers;
};

/// All that was seen of the wire between two hosts in all sweeps. Of its two directions the first is that from
/// the lower rank's host.
struct WireResult {
  Pair ranks = {};                         ///< one of each host
  std::map<int, std::string> errors = {};  ///< by the rank that had it
  std::vector<double> latencies = {};      ///< seconds, one for each sweep
  std::vector<double> rates[2] = {};       ///< bytes a second
  int64_t segments[2] = {};                ///< of TCP, in all sweeps
  int64_t resent_segments[2] = {};
  std::vector<double> clock_offsets = {};  ///< seconds: the second host's clock minus the first one's
};

struct JobObservations {
  std::vector<std::optional<RankFacts>> ranks;  ///< nothing: it did not answer, or not so as to be understood
  std::map<int, std::string> gone;              ///< ranks that ended or stopped answering: "ended during …"
  std::map<int, std::string> join_errors;
  std::map<int, std::string> all_errors;  ///< of the operations over all ranks
  std::map<int, double> clock_offsets;    ///< seconds, against rank 0
  std::vector<PairResult> pairs;          ///< those that were tested
  std::map<int, std::string> wires_used;  ///< by rank: "UCX 1.13.1 (tcp/eth0)"
  std::vector<WireResult> wires;          ///< between hosts, those that were tested

  /// On which host the rank is, for messages; its number where nothing is known of it.
  std::string host_name(int rank) const;
};

/// The order is that of the report: the ranks, what differs, what fails, what is slow.
Findings judge_job(const JobObservations& job);

// Its parts, by file.
Findings judge_ranks(const JobObservations& job);  // hosts, versions, cores, devices, variables, clocks
Findings judge_hosts(
    const JobObservations& job);  // kernels, interfaces, ports, memory and limits of each host
/// Between hosts: those that don't answer, are slow, in one direction or both, or lose what is sent.
Findings judge_wires(const JobObservations& job);
/// The wires that it names.
class BadWires {
 public:
  explicit BadWires(const JobObservations& job);
  /// Whether it is one of these that messages between the two ranks take.
  bool between(int rank, int other) const;

 private:
  using Hosts = std::pair<std::string, std::string>;
  Hosts hosts_of(int rank, int other) const;

  std::vector<std::string> host_of_;  // by rank; empty: unknown
  std::set<Hosts> hosts_;
};
Findings judge_communication(const JobObservations& job);  // joining, operations, pairs

}  // namespace lockstep::doctor
