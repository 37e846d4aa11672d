#pragma once

#include <optional>
#include <string>
#include <vector>

#include <lockstep/bench/internal/report.h>
#include <lockstep/bench/internal/throughput_log.h>
#include <lockstep/bench/scaling.h>

/// What `lockstep scaling` makes of its runs. Pure functions.
namespace lockstep::bench::internal {

/// One run of the program.
struct ScalingRun {
  double seconds = 0;  ///< from the first process's start to the last one's end
  std::optional<Throughput> marked = {};
  std::optional<Throughput> trainer = {};
};

/// All runs with one number of ranks, at least one.
struct ScalingRuns {
  int ranks = 0;
  int hosts = 1;  ///< over which they are spread
  std::vector<ScalingRun> runs = {};
  std::optional<double> barrier_us = {};  ///< median latency
};

/// Where the throughput comes from.
enum class ThroughputSource { kMarked, kTrainer, kTime };

/// Speedup is in units of the first point, which is what one rank would do if the loss began there: the
/// throughput divided by that of one of the first point's ranks.
struct ScalingPoint {
  int ranks = 0;
  int hosts = 1;
  double seconds = 0;
  double throughput = 0;
  double speedup = 0;
  double efficiency = 0;
  std::optional<double> barrier_us = {};
};

struct ScalingReport {
  ThroughputSource source = ThroughputSource::kTime;
  Scaling scaling = Scaling::kStrong;
  std::string unit = {};
  std::string hosts = {};  ///< "node-a:2,node-b:2"; empty: this one
  std::vector<ScalingPoint> points = {};
};

/// Medians over the runs. The source is the first of ThroughputSource that every run has, in one unit.
/// `all` holds at least one entry, ascending in ranks.
ScalingReport make_scaling_report(const std::vector<ScalingRuns>& all, Scaling scaling);

std::string format_scaling(const ScalingReport& report, const BenchMachine& machine,
                           const std::vector<std::string>& command);
std::string scaling_json(const ScalingReport& report, const BenchMachine& machine,
                         const std::vector<std::string>& command);
/// A picture of the speedup, and of what it would be without loss.
std::string scaling_svg(const ScalingReport& report, const std::vector<std::string>& command);

}  // namespace lockstep::bench::internal
