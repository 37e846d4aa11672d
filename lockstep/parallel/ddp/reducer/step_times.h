#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace lockstep {

/// When what happened in one synchronised iteration, in nanoseconds; and what was reduced.
struct StepTimes {
  int64_t forward_compute = 0;   ///< from the begin of forward to the begin of backward
  int64_t backward_compute = 0;  ///< from there to the last gradient
  int64_t backward_comm = 0;     ///< from the first bucket that was launched to the last that was reduced
  int64_t overlap = 0;           ///< of backward_comm before the last gradient
  int64_t exposed = 0;           ///< from the last gradient to the end of the last reduction
  int64_t reducing = 0;          ///< the operations' own durations, added up
  size_t bytes = 0;              ///< of gradients
  size_t bytes_in_place = 0;     ///< of these, that their kernels wrote where they were reduced
};

/// Takes one iteration's times after the other, and averages. A few clock readings an iteration. Used by one
/// thread at a time.
class StepClock {
 public:
  void begin_forward();
  /// The first begin after a forward counts.
  void begin_backward();
  void launch();
  void gradient(size_t bytes, bool in_place);
  /// The iteration of this number (from 0) is reduced; `reducing`: the operations' durations added up.
  void finish(int64_t iteration, std::chrono::nanoseconds reducing);
  /// Times are kept of the first 10 iterations, and then of every so many.
  void set_sample_rate(int iterations) { sample_rate_ = iterations; }
  /// The iteration failed, or begins anew.
  void reset();

  const StepTimes& last() const { return last_; }
  /// Means over the iterations since the first, which differs.
  StepTimes average() const;
  /// Since backward began, of the gradient that arrived last.
  std::chrono::nanoseconds since_backward() const;

 private:
  using Clock = std::chrono::steady_clock;
  std::optional<Clock::time_point> forward_, backward_, launch_;
  Clock::time_point gradient_;
  size_t bytes_ = 0, bytes_in_place_ = 0;
  StepTimes last_, sum_;
  int64_t iterations_ = 0, averaged_ = 0;
  int sample_rate_ = 100;
};

}  // namespace lockstep
