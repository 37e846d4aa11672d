#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <lockstep/bench/internal/cases.h>

namespace lockstep::bench::internal {

/// What all ranks together saw; the same on each.
struct Sample {
  std::vector<int64_t> nanoseconds;  ///< the slowest rank's, for each timed iteration
  int64_t wrong = 0;                 ///< elements, over all ranks and iterations, warm-up included
};

/// Runs the case: in each iteration fresh data, a barrier, the collective under the clock, a look at the
/// result. `progress` is told the number of iterations done. All ranks of the default group call it.
Sample measure(const Case& measured, int64_t iterations, int64_t warmup,
               const std::function<void(int64_t done)>& progress);

}  // namespace lockstep::bench::internal
