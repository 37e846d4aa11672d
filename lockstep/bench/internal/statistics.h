#pragma once

#include <cstdint>
#include <vector>

/// Pure functions of what was measured.
namespace lockstep::bench::internal {

/// Statistics of the iterations' times, in microseconds.
struct TimeSummary {
  double mean = 0;
  double min = 0;
  double p50 = 0;
  double p99 = 0;
  double max = 0;
};

/// The smallest value that at least `percent` of all values do not exceed (nearest rank); of 20 values the
/// largest is p99. `sorted` is ascending and not empty, percent in (0, 100].
int64_t percentile(const std::vector<int64_t>& sorted, double percent);

/// The summary of times in nanoseconds, of which there is at least one.
TimeSummary summarize(std::vector<int64_t> nanoseconds);

/// `times` holds one row of `iterations` for each rank: the largest of each iteration, for it is over when
/// the slowest rank is through.
std::vector<int64_t> slowest(const std::vector<int64_t>& times, int64_t iterations);

/// GB/s, of 10^9 bytes.
double bandwidth(int64_t bytes, double microseconds);

}  // namespace lockstep::bench::internal
