#include <chrono>

#include <ATen/ops/empty.h>

#include <lockstep/bench/internal/measure.h>
#include <lockstep/bench/internal/statistics.h>
#include <lockstep/collectives/functional.h>

namespace lockstep::bench::internal {
namespace {

using Clock = std::chrono::steady_clock;

at::Tensor to_tensor(const std::vector<int64_t>& values) {
  const at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

std::vector<int64_t> slowest_of_all_ranks(const std::vector<int64_t>& mine) {
  const auto iterations = static_cast<int64_t>(mine.size());
  const at::Tensor all = at::empty({iterations * get_world_size()}, at::kLong);
  all_gather_into_tensor(all, to_tensor(mine));
  const auto* times = all.const_data_ptr<int64_t>();
  return slowest(std::vector<int64_t>(times, times + all.numel()), iterations);
}

}  // namespace

Sample measure(const Case& measured, int64_t iterations, int64_t warmup,
               const std::function<void(int64_t done)>& progress) {
  std::vector<int64_t> mine;
  mine.reserve(static_cast<size_t>(iterations));
  int64_t wrong = 0;
  for (int64_t i = 0; i < warmup + iterations; ++i) {
    measured.prepare(i);
    barrier();
    const auto begin = Clock::now();
    measured.run();
    const std::chrono::nanoseconds elapsed = Clock::now() - begin;
    if (i >= warmup) {
      mine.push_back(static_cast<int64_t>(static_cast<double>(elapsed.count()) * measured.time_share));
    }
    wrong += measured.count_wrong(i);
    progress(i + 1);
  }
  const at::Tensor total = to_tensor({wrong});
  all_reduce(total);
  return {slowest_of_all_ranks(mine), *total.const_data_ptr<int64_t>()};
}

}  // namespace lockstep::bench::internal
