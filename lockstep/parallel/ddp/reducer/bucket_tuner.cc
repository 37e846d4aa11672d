#include <algorithm>
#include <limits>

#include <lockstep/parallel/ddp/reducer/bucket_tuner.h>

namespace lockstep {

double predict_end(const BackwardProfile& profile, const BucketCaps& caps) {
  double delay = 0;  // of the computation, by reductions that took its core
  double communication_free = 0;
  double computation_end = 0;
  size_t bytes = 0;
  size_t cap = caps.first;
  for (size_t i = 0; i < profile.gradients.size(); ++i) {
    bytes += profile.gradients[i].bytes;
    computation_end = profile.gradients[i].arrival + delay;
    const bool last = i + 1 == profile.gradients.size();
    if (bytes < cap && !last) continue;
    const double duration =
        profile.seconds_per_operation + static_cast<double>(bytes) * profile.seconds_per_byte;
    communication_free = std::max(communication_free, computation_end) + duration;
    if (!profile.spare_core && !last) delay += duration;
    bytes = 0;
    cap = caps.others;
  }
  return std::max(communication_free, computation_end);
}

BucketCaps choose_bucket_caps(const BackwardProfile& profile, const BucketCaps& fallback) {
  constexpr size_t kMiB = size_t{1} << 20;
  constexpr size_t kAll = std::numeric_limits<size_t>::max();
  constexpr double kWorthwhile = 0.99;
  BucketCaps best = fallback;
  double best_end = predict_end(profile, fallback) * kWorthwhile;
  for (const size_t others : {kMiB, 2 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB, 25 * kMiB, 50 * kMiB, kAll}) {
    for (const size_t first : {kMiB, others}) {
      const BucketCaps caps{std::min(first, others), others};
      const double end = predict_end(profile, caps);
      if (end < best_end) {
        best_end = end;
        best = caps;
      }
    }
  }
  return best;
}

}  // namespace lockstep
