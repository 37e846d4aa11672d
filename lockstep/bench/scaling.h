#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/launch/agent/agent.h>

/// `lockstep scaling`: runs a program with 1, 2, 4, … ranks and tells what more ranks bring. docs/bench.md says
/// what the columns mean.
namespace lockstep::bench {

/// What the program does more of when there are more ranks; it matters where only time tells its throughput.
enum class Scaling {
  kStrong,  ///< nothing: an epoch over the same data takes less time
  kWeak,    ///< its work: as many steps on each rank
};

struct ScalingOptions {
  std::vector<std::string> command;  ///< the program and its arguments
  std::vector<int> ranks = {};       ///< ascending; see parse_rank_list() and powers_of_two()
  int repeats = 1;                   ///< runs with each number of ranks, whose median counts
  Scaling scaling = Scaling::kStrong;
  std::chrono::nanoseconds grace_period = std::chrono::seconds(30);  ///< as of `lockstep run`
  /// Files for the results, as JSON and as a picture (SVG); "-" is standard output (the table then goes to
  /// standard error).
  std::string json = {};
  std::string plot = {};
  /// Runs a job and returns its exit status, as launch::run() does on this host.
  std::function<int(const launch::RunOptions&)> run_job = &launch::run;
  /// The hosts over which run_job() spreads ranks, "node-a:2,node-b:2", for the report; empty: this one.
  std::string hosts = {};
  /// The `lockstep` program, which measures the barrier by `lockstep bench`; empty: it is not measured.
  std::string lockstep = {};
  /// Called between measuring the barrier and running the program.
  std::function<void()> before_program = {};
};

/// "1,2,4" as numbers, ascending, each once. Throws c10::ValueError.
std::vector<int> parse_rank_list(const std::string& text);
/// 1, 2, 4, … up to `most`, which is the last.
std::vector<int> powers_of_two(int most);

/// Runs everything. The program's output goes to standard error. OMP_NUM_THREADS is 1 unless it is set, with one
/// rank, too.
///
/// Returns the exit status: 0; 1 when a run failed; 128 + N when signal N ended it (what was measured until
/// then is printed). Throws c10::ValueError for options that make no sense and for a program that can't be
/// started, before or at the first run. To be called by the main thread of a program that does nothing else.
int scale(const ScalingOptions& options);

}  // namespace lockstep::bench
