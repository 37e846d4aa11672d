#pragma once

#include <cstdint>
#include <string>

#include <lockstep/serialization/state_dict.h>

namespace lockstep {

/// Whether a metric is better when it is lower or higher.
enum class MetricMode { min, max };

struct EarlyStoppingOptions {
  std::string monitor = "validation/loss";  ///< a key of the epoch's metrics
  double min_delta = 0.0;                   ///< a change of at most this much is no improvement
  int64_t patience = 3;                     ///< epochs without improvement before training stops
  MetricMode mode = MetricMode::min;
};

/// Tells when a metric has stopped improving. Lightning's EarlyStopping, with its names and defaults. All
/// ranks must give the same values; then all get the same answer. Used by one thread at a time.
class EarlyStopping {
 public:
  /// Throws c10::ValueError for a negative min_delta and a patience below 1.
  explicit EarlyStopping(EarlyStoppingOptions options);

  /// To be called once an epoch. Returns stopped(). NaN and infinities of the wrong sign are no improvement.
  bool update(double value);
  bool stopped() const { return wait_count_ >= options_.patience; }
  double best_score() const { return best_score_; }
  int64_t wait_count() const { return wait_count_; }  ///< epochs since the best one
  const EarlyStoppingOptions& options() const { return options_; }

  /// {"wait_count", "best_score"}
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  EarlyStoppingOptions options_;
  int64_t wait_count_ = 0;
  double best_score_;
};

}  // namespace lockstep
