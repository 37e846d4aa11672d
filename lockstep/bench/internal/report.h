#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/bench/internal/plan.h>
#include <lockstep/bench/internal/statistics.h>
#include <lockstep/rendezvous/topology.h>

/// The table that nccl-tests prints, and the same as JSON. Pure functions, but for describe_machine().
namespace lockstep::bench::internal {

/// One collective at one size in one placement.
struct Measurement {
  TimeSummary time;
  double algbw = 0;                  ///< GB/s
  std::optional<double> busbw = {};  ///< GB/s; nothing for a barrier
  int64_t wrong = 0;
};

/// A line of the table.
struct Row {
  const CollectiveInfo* info = nullptr;
  int64_t bytes = 0;
  int64_t count = 0;
  std::optional<Measurement> out_of_place = {};
  std::optional<Measurement> in_place = {};
};

/// Where it was measured.
struct BenchMachine {
  std::string host;  // rank 0's
  int cores = 0;     // of that host
  std::string lockstep_version;
  std::string torch_version;
  Topology topology = {};  // of the ranks that were measured
};
BenchMachine describe_machine();

Measurement make_measurement(const CollectiveInfo& info, int64_t bytes, int ranks,
                             const std::vector<int64_t>& nanoseconds, int64_t wrong);

/// The table's parts, each ending with a newline. All but the rows begin with '#', and a row has a field for
/// every column ("-" where there is nothing): the first thirteen are nccl-tests', in its order, the last four
/// the percentiles.
std::string format_header(const Plan& plan, const BenchMachine& machine);
std::string format_columns(const CollectiveInfo& info);
std::string format_row(const Plan& plan, const Row& row);
/// The end of one collective's rows.
std::string format_footer(const std::vector<Row>& rows);

/// Over both placements.
int64_t count_wrong(const std::vector<Row>& rows);
/// The mean over all rows and placements; nothing when they have none (barriers).
std::optional<double> average_busbw(const std::vector<Row>& rows);

/// docs/bench.md describes the fields.
std::string to_json(const Plan& plan, const BenchMachine& machine, const std::vector<Row>& rows);

}  // namespace lockstep::bench::internal
