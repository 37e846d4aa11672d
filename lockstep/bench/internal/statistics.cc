#include <algorithm>
#include <cmath>
#include <numeric>

#include <c10/util/Exception.h>

#include <lockstep/bench/internal/statistics.h>

namespace lockstep::bench::internal {

int64_t percentile(const std::vector<int64_t>& sorted, double percent) {
  TORCH_INTERNAL_ASSERT(!sorted.empty() && percent > 0 && percent <= 100);
  const auto rank = static_cast<size_t>(std::ceil(percent / 100 * static_cast<double>(sorted.size())));
  return sorted[std::clamp<size_t>(rank, 1, sorted.size()) - 1];
}

TimeSummary summarize(std::vector<int64_t> nanoseconds) {
  TORCH_INTERNAL_ASSERT(!nanoseconds.empty());
  std::sort(nanoseconds.begin(), nanoseconds.end());
  const double sum = std::accumulate(nanoseconds.begin(), nanoseconds.end(), 0.0);
  const auto microseconds = [](int64_t value) { return static_cast<double>(value) / 1e3; };
  return {.mean = sum / static_cast<double>(nanoseconds.size()) / 1e3,
          .min = microseconds(nanoseconds.front()),
          .p50 = microseconds(percentile(nanoseconds, 50)),
          .p99 = microseconds(percentile(nanoseconds, 99)),
          .max = microseconds(nanoseconds.back())};
}

std::vector<int64_t> slowest(const std::vector<int64_t>& times, int64_t iterations) {
  const auto columns = static_cast<size_t>(iterations);
  TORCH_INTERNAL_ASSERT(iterations > 0 && !times.empty() && times.size() % columns == 0);
  std::vector<int64_t> result(times.begin(), times.begin() + iterations);
  for (size_t i = columns; i < times.size(); ++i)
    result[i % columns] = std::max(result[i % columns], times[i]);
  return result;
}

double bandwidth(int64_t bytes, double microseconds) {
  return microseconds > 0 ? static_cast<double>(bytes) / microseconds / 1e3 : 0;
}

}  // namespace lockstep::bench::internal
