#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <lockstep/parallel/ddp/reducer/bucket.h>
#include <lockstep/parallel/ddp/reducer/bucket_tuner.h>
#include <lockstep/parallel/ddp/reducer/reducer_settings.h>
#include <lockstep/parallel/ddp/reducer/reduction_round.h>

namespace lockstep {

/// At what sizes buckets are closed: the user's, those of torch, or what measured rounds suggest. Results do
/// not depend on them: each element is folded in rank order. No thread-safety of its own.
class BucketSizes {
 public:
  explicit BucketSizes(const ReducerSettings& settings) : settings_(settings) {}

  BucketCaps caps() const;
  /// As assign_buckets() wants them; before the order of gradients is known, and then.
  std::vector<size_t> initial_limits() const;
  std::vector<size_t> limits() const { return limits_of(caps()); }

  /// The round that has been reduced, with buckets in the order of arrival.
  void measure(const ReductionRound& round, const std::vector<Bucket>& buckets);
  /// Before a forward, after so many rounds: chooses sizes when that is due, by rank 0's measurements;
  /// collective then. Whether they have changed.
  bool tune(int64_t rounds);
  /// Whether sizes were chosen, be they others or not.
  bool tuned() const { return chosen_.has_value(); }
  /// Takes these as chosen.
  void force(const BucketCaps& caps) { chosen_ = caps; }
  /// Forgets measurements and choice.
  void restart();

 private:
  struct Reduction {
    double seconds = 0;
    size_t bytes = 0;
  };
  bool may_tune() const;
  std::vector<size_t> limits_of(const BucketCaps& caps) const;
  BackwardProfile profile() const;

  const ReducerSettings& settings_;
  std::optional<BucketCaps> chosen_;
  bool done_ = false;                          // tuning
  std::vector<std::vector<double>> arrivals_;  // by round: seconds, by parameter
  std::vector<Reduction> reductions_;          // in these rounds
};

}  // namespace lockstep
