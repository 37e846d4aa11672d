#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

enum class RoundPhase : uint8_t {
  kIdle,        // no gradient has arrived
  kCounting,    // gradients arrive, and none is reduced yet: a static graph's first round
  kCollecting,  // gradients arrive, and full buckets are launched
  kLaunched,    // all buckets are; the end of backward is to finish the round
};

/// How far one reduction of all parameters is: its phase, the gradients that have arrived, the buckets that
/// are launched. docs/internals/reducer.md draws the phases. No thread-safety of its own.
class ReductionRound {
 public:
  struct Arrival {
    size_t parameter;
    double seconds;  // since backward began
  };

  RoundPhase phase() const { return phase_; }
  bool open() const { return phase_ != RoundPhase::kIdle; }
  /// The one place where the phase changes. An idle round is empty.
  void enter(RoundPhase next);

  /// Used parameters, in order. While counting, without times.
  std::vector<Arrival>& arrivals() { return arrivals_; }
  const std::vector<Arrival>& arrivals() const { return arrivals_; }
  /// The first bucket that is not launched.
  size_t next_bucket() const { return next_bucket_; }
  /// The same; it counts as launched from now on.
  size_t launch_next() { return next_bucket_++; }

 private:
  RoundPhase phase_ = RoundPhase::kIdle;
  std::vector<Arrival> arrivals_;
  size_t next_bucket_ = 0;
};

}  // namespace lockstep
