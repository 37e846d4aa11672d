#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

#include <lockstep/bench/internal/collective.h>
#include <lockstep/bench/internal/plan.h>

namespace lockstep::bench::internal {

/// This rank's two buffers, of the plan's type and sizes; cases use their beginnings.
struct Buffers {
  at::Tensor first;
  at::Tensor second;
};

/// Allocates them in the plan's kind of memory. All ranks call it.
Buffers allocate_buffers(const Plan& plan);

/// One collective on buffers of one size, as one rank sees it. Holds views of the buffers.
struct Case {
  /// Writes fresh data for this iteration; different in each, so that a result left over from the last one is
  /// wrong.
  std::function<void(int64_t iteration)> prepare;
  /// The collective. All ranks call it.
  std::function<void()> run;
  /// How many elements of this rank's result are wrong.
  std::function<int64_t(int64_t iteration)> count_wrong;
  /// This rank's part of the measured time: 1, but for a ping-pong, which counts half of rank 0's round trip.
  double time_share = 1;
};

/// `rank` is this one's. `count`: elements of a rank's part, as in Step::counts.
Case make_case(const Plan& plan, const CollectiveInfo& info, Placement placement, int64_t count, int rank,
               const Buffers& buffers);

}  // namespace lockstep::bench::internal
