#pragma once

#include <cstddef>
#include <vector>

namespace lockstep {

/// Sizes at which buckets are closed, in bytes: the first's, and all others'.
struct BucketCaps {
  size_t first = 0;
  size_t others = 0;
  bool operator==(const BucketCaps&) const = default;
};

/// What the first iterations showed, on one rank. Times in seconds.
struct BackwardProfile {
  struct Gradient {
    size_t bytes = 0;
    double arrival = 0;  ///< since backward began
  };
  std::vector<Gradient> gradients;  ///< in order of arrival
  double seconds_per_byte = 0;      ///< of a reduction
  double seconds_per_operation = 0;
  /// Whether a core is idle while this rank computes. If none is, a reduction in the background delays the
  /// computation by as much as it takes.
  bool spare_core = false;
};

/// When everything would be reduced with these caps, in seconds since backward began.
double predict_end(const BackwardProfile& profile, const BucketCaps& caps);

/// Caps with which backward and communication would be done earliest. `fallback` unless others are better by
/// at least 1 %. A pure function.
BucketCaps choose_bucket_caps(const BackwardProfile& profile, const BucketCaps& fallback);

}  // namespace lockstep
