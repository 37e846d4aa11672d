#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <lockstep/base/process/cpu.h>
#include <lockstep/base/upper_median.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/parallel/ddp/reducer/bucket_sizes.h>

namespace lockstep {
namespace {

constexpr BucketCaps kDefaultCaps{size_t{1} << 20, size_t{25} << 20};
/// Rounds with rebuilt buckets from whose measurements sizes are chosen; the first of them still learns where
/// gradients come from.
constexpr int64_t kMeasuredRounds = 8;

size_t bytes_of(double mib) {
  return static_cast<size_t>(mib * (1 << 20));
}

/// What a group's place tells of its reductions.
struct Surroundings {
  double seconds_per_operation;
  bool spare_core;
};

Surroundings surroundings_of(const ProcessGroup& group) {
  const auto backend = lockstep_backend_of(*group);
  // Between hosts a reduction mostly waits for the wire, which takes no core from the computation. A short one takes some
  // round trips.
  if (backend && backend->spans_hosts()) return {100e-6, true};
  // Announcing, and waking the communication thread.
  return {20e-6, usable_cores() > group->getSize() * at::get_num_threads()};
}

}  // namespace

BucketCaps BucketSizes::caps() const {
  if (chosen_) return *chosen_;
  const auto& options = settings_.options;
  const size_t others = options.bucket_cap_mb ? bytes_of(*options.bucket_cap_mb) : kDefaultCaps.others;
  if (options.first_bucket_cap_mb) return {bytes_of(*options.first_bucket_cap_mb), others};
  return {options.bucket_cap_mb ? others : kDefaultCaps.first, others};
}

std::vector<size_t> BucketSizes::limits_of(const BucketCaps& caps) const {
  if (settings_.options.bucket_cap_mb_list.empty()) return {caps.first, caps.others};
  std::vector<size_t> limits;
  for (const double mib : settings_.options.bucket_cap_mb_list) limits.push_back(bytes_of(mib));
  return limits;
}

/// One bucket: if the model communicates in its own backward, too, buckets in a wrong order could come
/// between (torch/nn/parallel/distributed.py, _ddp_init_helper).
std::vector<size_t> BucketSizes::initial_limits() const {
  constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();
  return settings_.finds_unused() ? limits() : limits_of({kNoLimit, kNoLimit});
}

bool BucketSizes::may_tune() const {
  // On a device the host's clock does not tell when gradients are there.
  const auto& options = settings_.options;
  return !done_ && settings_.on_cpu && !options.bucket_cap_mb && !options.first_bucket_cap_mb &&
         options.bucket_cap_mb_list.empty() && !settings_.hook && settings_.group()->getSize() > 1;
}

void BucketSizes::measure(const ReductionRound& round, const std::vector<Bucket>& buckets) {
  if (!may_tune()) return;
  auto& seconds = arrivals_.emplace_back(settings_.size(), 0.0);
  for (const auto& arrival : round.arrivals()) seconds[arrival.parameter] = arrival.seconds;
  for (const Bucket& bucket : buckets) {
    if (!bucket.work || bucket.sparse) continue;
    reductions_.push_back({std::chrono::duration<double>(duration_of(bucket.work)).count(), bucket.bytes});
  }
}

bool BucketSizes::tune(int64_t rounds) {
  if (!may_tune() || rounds < kMeasuredRounds) return false;
  done_ = true;
  const BucketCaps before = caps();
  BucketCaps best = before;
  if (!chosen_ && !arrivals_.empty() && !reductions_.empty()) best = choose_bucket_caps(profile(), before);
  at::Tensor agreed = at::empty({2}, at::kLong);
  auto* values = agreed.mutable_data_ptr<int64_t>();
  values[0] = static_cast<int64_t>(std::min<size_t>(best.first, std::numeric_limits<int64_t>::max()));
  values[1] = static_cast<int64_t>(std::min<size_t>(best.others, std::numeric_limits<int64_t>::max()));
  std::vector<at::Tensor> tensors{agreed};
  const CallSite site("DDP's sizes of buckets");
  settings_.group()->broadcast(tensors)->wait();
  chosen_ = BucketCaps{static_cast<size_t>(values[0]), static_cast<size_t>(values[1])};
  arrivals_.clear();
  reductions_.clear();
  return *chosen_ != before;
}

void BucketSizes::restart() {
  done_ = false;
  chosen_.reset();
  arrivals_.clear();
  reductions_.clear();
}

BackwardProfile BucketSizes::profile() const {
  BackwardProfile profile;
  std::vector<std::pair<double, size_t>> arrivals;  // seconds, parameter
  for (size_t index = 0; index < settings_.size(); ++index) {
    std::vector<double> seconds;
    for (const auto& round : arrivals_) seconds.push_back(round[index]);
    arrivals.emplace_back(upper_median(std::move(seconds)), index);
  }
  std::sort(arrivals.begin(), arrivals.end());
  for (const auto& [seconds, index] : arrivals) {
    profile.gradients.push_back({settings_.tensors[index].nbytes(), seconds});
  }
  // The shortest of each size: the others waited for a late rank.
  const auto by_bytes = [](const Reduction& a, const Reduction& b) {
    return std::pair(a.bytes, -a.seconds) < std::pair(b.bytes, -b.seconds);
  };
  const Reduction largest = *std::max_element(reductions_.begin(), reductions_.end(), by_bytes);
  const Surroundings where = surroundings_of(settings_.group());
  profile.seconds_per_operation = where.seconds_per_operation;
  profile.seconds_per_byte = std::max(0.0, largest.seconds - where.seconds_per_operation) /
                             std::max<double>(1, static_cast<double>(largest.bytes));
  profile.spare_core = where.spare_core;
  return profile;
}

}  // namespace lockstep
