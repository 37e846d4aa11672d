// How the reducer's buckets are made, made anew, and sized.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <lockstep/base/log.h>
#include <lockstep/base/process/cpu.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/parallel/ddp/reducer/bucket_assignment.h>
#include <lockstep/parallel/ddp/reducer/reducer.h>

namespace lockstep {
namespace {

constexpr double kMiB = 1 << 20;
constexpr BucketCaps kDefaultCaps{size_t{1} << 20, size_t{25} << 20};
constexpr BucketCaps kOneBucket{std::numeric_limits<size_t>::max(), std::numeric_limits<size_t>::max()};
/// Rounds with rebuilt buckets from whose measurements sizes are chosen; the first of them still learns where
/// gradients come from.
constexpr int64_t kMeasuredRounds = 8;
/// So many moves of buckets are worth a warning.
constexpr int kMovesToWarn = 10;

size_t bytes_of(double mib) {
  return static_cast<size_t>(mib * kMiB);
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

/// Sizes that the user gave, or those of torch.
BucketCaps Reducer::caps_in_use() const {
  if (chosen_caps_) return *chosen_caps_;
  const size_t others = options_.bucket_cap_mb ? bytes_of(*options_.bucket_cap_mb) : kDefaultCaps.others;
  if (options_.first_bucket_cap_mb) return {bytes_of(*options_.first_bucket_cap_mb), others};
  return {options_.bucket_cap_mb ? others : kDefaultCaps.first, others};
}

/// Before the order of gradients is known, one bucket: if the model communicates in its own backward, too,
/// buckets in a wrong order could come between (torch/nn/parallel/distributed.py, _ddp_init_helper).
BucketCaps Reducer::initial_caps() const {
  return static_graph_ || !options_.find_unused_parameters ? kOneBucket : caps_in_use();
}

/// Torch's first buckets: in the order of definition, the last ones first.
void Reducer::build_initial_buckets() {
  std::vector<size_t> order(parameters_.size());
  std::iota(order.begin(), order.end(), 0);
  build_buckets(order, initial_caps(), /*last_first=*/true);
}

void Reducer::build_buckets(const std::vector<size_t>& order, const BucketCaps& caps, bool last_first) {
  std::vector<ParameterSize> sizes;
  std::vector<size_t> bytes;
  for (const Parameter& parameter : parameters_) {
    bytes.push_back(parameter.sparse ? 0 : parameter.tensor.nbytes());
    // All devices are of one type, so the number tells them apart; the CPU has none (-1).
    const int device = parameter.tensor.device().index() + 1;
    const int kind =
        device * static_cast<int>(at::ScalarType::NumOptions) + static_cast<int>(own_dtypes_[sizes.size()]);
    sizes.push_back({parameter.tensor.nbytes(), kind, parameter.sparse});
  }
  std::vector<size_t> limits{caps.first, caps.others};
  if (!options_.bucket_cap_mb_list.empty()) {
    limits.clear();
    for (const double mib : options_.bucket_cap_mb_list) limits.push_back(bytes_of(mib));
  }
  if (slots_) slots_->disconnect();
  auto old_buckets = std::exchange(buckets_, {});
  const auto old_places = std::exchange(places_, std::vector<Place>(parameters_.size()));
  auto assignment = assign_buckets(sizes, order, limits);
  if (last_first) std::reverse(assignment.begin(), assignment.end());
  for (auto& members : assignment) {
    const size_t first = members.front();
    Bucket bucket;
    bucket.sparse = parameters_[first].sparse;
    bucket.parameters = std::move(members);
    if (!bucket.sparse) {
      const auto dtype = reduce_dtype_.value_or(own_dtypes_[first]);
      give_memory(bucket, tensors_, {group_, dtype, /*aligned=*/!hook_});
    }
    for (size_t position = 0; position < bucket.parameters.size(); ++position) {
      places_[bucket.parameters[position]] = {buckets_.size(), position};
    }
    buckets_.push_back(std::move(bucket));
  }
  if (!old_buckets.empty()) {
    for (size_t index = 0; index < parameters_.size(); ++index) {
      if (!parameters_[index].sparse) {
        keep_gradient(index, old_buckets[old_places[index].bucket], old_places[index].position);
      }
    }
    for (Bucket& old : old_buckets) abandon_memory(old);
  }
  slots_ = std::make_shared<GradientSlots>(std::move(bytes), [this](size_t index) {
    const Place place = places_[index];
    // What is ready may be on its way to the others. What is added to a gradient that is there needs no slot;
    // as a bucket view that one lies in it already.
    if (ready_[index] || reduce_dtype_ || tensors_[index].mutable_grad().defined()) return MemoryBlock{};
    return buckets_[place.bucket].memory->take(place.position);
  });
  graph_task_ = -1;
  begin_round();
}

/// A gradient that lies in an old bucket (not zeroed, accumulated under no_sync) moves along, unless the user
/// holds it: that one stays where it is, and is copied in and back.
void Reducer::keep_gradient(size_t index, const Bucket& old, size_t old_position) {
  at::NoGradGuard no_grad;
  const at::Tensor& gradient = tensors_[index].grad();
  if (!gradient.defined() || gradient.layout() != c10::kStrided || gradient.requires_grad() ||
      !lies_in_slot(old, old_position, gradient) ||
      (!options_.gradient_as_bucket_view && held_by_others(gradient))) {
    return;
  }
  const Place place = places_[index];
  buckets_[place.bucket].views[place.position].copy_(gradient);
  give_slot(index);
}

void Reducer::build_buckets_again() {
  if (!rebuilt_) return build_initial_buckets();
  std::vector<size_t> order;
  for (const Bucket& bucket : buckets_) {
    order.insert(order.end(), bucket.parameters.begin(), bucket.parameters.end());
  }
  build_buckets(order, caps_in_use());
}

/// A tensor outlives its step in the slot that `needed`, a parameter, needs. What has arrived in this round
/// moves along.
void Reducer::move_to_new_memory(Bucket& bucket, size_t needed) {
  if (++moves_ == kMovesToWarn) {
    LOCKSTEP_LOG(kWarning) << "memory of the gradient of '" << parameters_[needed].name
                           << "' is still in use, so its bucket of "
                           << format_bytes(static_cast<int64_t>(bucket.bytes)) << " moves to new memory; the "
                           << kMovesToWarn
                           << "th such move, each of which costs time and memory. If the program keeps "
                              "gradients beyond their step, clone() them";
  }
  bucket.streams.join(bucket.views.front().device());  // what has arrived may have come on others
  const auto old_memory = bucket.memory;
  auto old_views = bucket.views;
  give_memory(bucket, tensors_, {group_, old_views.front().scalar_type(), /*aligned=*/!hook_});
  for (size_t position = 0; position < bucket.parameters.size(); ++position) {
    const size_t index = bucket.parameters[position];
    if (!ready_[index]) continue;
    bucket.views[position].copy_(old_views[position]);
    const at::Tensor& gradient = tensors_[index].grad();
    if (!gradient.defined() || gradient.const_data_ptr() != old_views[position].const_data_ptr()) continue;
    if (!options_.gradient_as_bucket_view && held_by_others(gradient)) {
      bucket.copy_back.push_back(position);
      continue;
    }
    give_slot(index);
  }
  old_views.clear();
  old_memory->abandon();
}

void Reducer::rebuild_buckets() {
  std::lock_guard lock(mutex_);
  if (round_.open()) return;  // gradients of an unfinished round lie in them
  if (!static_graph_ && options_.find_unused_parameters) return;  // the order may change from round to round
  if (rounds_ == rounds_at_reset_) return;
  if (rebuilt_) {
    if (tunes() && !tuned_ && rounds_ - rounds_at_reset_ >= kMeasuredRounds) tune();
    return;
  }
  rebuilt_ = true;
  std::vector<size_t> order = last_arrival_order_;
  for (size_t index = 0; index < parameters_.size(); ++index) {
    if (std::find(order.begin(), order.end(), index) == order.end()) order.push_back(index);
  }
  at::Tensor agreed = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
  std::copy(order.begin(), order.end(), agreed.mutable_data_ptr<int64_t>());
  std::vector<at::Tensor> tensors{agreed};
  group_->broadcast(tensors)->wait();
  const auto* indices = agreed.const_data_ptr<int64_t>();
  build_buckets({indices, indices + agreed.numel()}, caps_in_use());
}

bool Reducer::tunes() const {
  // On a device the host's clock does not tell when gradients are there.
  return on_cpu_ && !options_.bucket_cap_mb && !options_.first_bucket_cap_mb &&
         options_.bucket_cap_mb_list.empty() && !hook_ && group_->getSize() > 1;
}

/// Rank 0's measurements decide. Results do not depend on the sizes: each element is folded in rank order.
void Reducer::tune() {
  tuned_ = true;
  BucketCaps caps = caps_in_use();
  if (!chosen_caps_ && !measured_.empty() && !reductions_.empty()) caps = choose_bucket_caps(profile(), caps);
  at::Tensor agreed = at::empty({2}, at::kLong);
  auto* values = agreed.mutable_data_ptr<int64_t>();
  values[0] = static_cast<int64_t>(std::min<size_t>(caps.first, std::numeric_limits<int64_t>::max()));
  values[1] = static_cast<int64_t>(std::min<size_t>(caps.others, std::numeric_limits<int64_t>::max()));
  std::vector<at::Tensor> tensors{agreed};
  group_->broadcast(tensors)->wait();
  const BucketCaps chosen{static_cast<size_t>(values[0]), static_cast<size_t>(values[1])};
  const bool change = chosen != caps_in_use();
  chosen_caps_ = chosen;
  if (change) build_buckets_again();
  measured_.clear();
  reductions_.clear();
}

BackwardProfile Reducer::profile() const {
  BackwardProfile profile;
  std::vector<std::pair<double, size_t>> arrivals;  // seconds, parameter
  for (size_t index = 0; index < parameters_.size(); ++index) {
    std::vector<double> seconds;
    for (const auto& round : measured_) seconds.push_back(round[index]);
    arrivals.emplace_back(median(std::move(seconds)), index);
  }
  std::sort(arrivals.begin(), arrivals.end());
  for (const auto& [seconds, index] : arrivals) {
    profile.gradients.push_back({tensors_[index].nbytes(), seconds});
  }
  // The shortest of each size: the others waited for a late rank.
  const auto by_bytes = [](const Reduction& a, const Reduction& b) {
    return std::pair(a.bytes, -a.seconds) < std::pair(b.bytes, -b.seconds);
  };
  const Reduction largest = *std::max_element(reductions_.begin(), reductions_.end(), by_bytes);
  constexpr double kSecondsPerOperation = 20e-6;  // announcing, and waking the communication thread
  profile.seconds_per_operation = kSecondsPerOperation;
  profile.seconds_per_byte = std::max(0.0, largest.seconds - kSecondsPerOperation) /
                             std::max<double>(1, static_cast<double>(largest.bytes));
  profile.spare_core = usable_cores() > group_->getSize() * at::get_num_threads();
  return profile;
}

void Reducer::note_round(std::chrono::nanoseconds reducing) {
  constexpr int64_t kAlwaysSampled = 10;
  if (rounds_ < kAlwaysSampled || rounds_ % sample_rate_ == 0) {
    clock_.finish(reducing);
  } else {
    clock_.reset();
  }
  if (used_before_.empty()) used_before_ = used_;
  same_graph_ = same_graph_ && used_before_ == used_;
  unused_bytes_ = 0;
  for (const size_t index : unused_) unused_bytes_ += tensors_[index].nbytes();
  ++rounds_;
  fingerprint_.take(tensors_);
  last_arrival_order_.clear();
  for (const auto& arrival : round_.arrivals()) last_arrival_order_.push_back(arrival.parameter);
  if (!tunes() || tuned_ || !rebuilt_) return;
  std::vector<double> seconds(parameters_.size(), 0);
  for (const auto& arrival : round_.arrivals()) seconds[arrival.parameter] = arrival.seconds;
  measured_.push_back(std::move(seconds));
  for (const Bucket& bucket : buckets_) {
    if (!bucket.work || bucket.sparse) continue;
    reductions_.push_back({std::chrono::duration<double>(duration_of(bucket.work)).count(), bucket.bytes});
  }
}

void Reducer::force_caps(const BucketCaps& caps) {
  std::lock_guard lock(mutex_);
  chosen_caps_ = caps;
  if (rebuilt_) build_buckets_again();
}

// ---- Another group, and ranks without inputs

void Reducer::update_process_group(const ProcessGroup& group) {
  std::lock_guard lock(mutex_);
  abandon_round();
  group_ = options_.process_group = group;
  rebuilt_ = tuned_ = false;
  hook_of_old_group_ = true;
  chosen_caps_.reset();
  measured_.clear();
  reductions_.clear();
  last_arrival_order_.clear();
  globally_used_.clear();
  unused_.clear();
  std::fill(uses_.begin(), uses_.end(), 0);
  rounds_at_reset_ = rounds_;
  synchronise_ = false;
  build_initial_buckets();
}

void Reducer::shadow_backward() {
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  synchronise_ = true;
  if (round_.phase() < RoundPhase::kCollecting) round_.enter(RoundPhase::kCollecting);
  for (Bucket& bucket : buckets_) {
    if (bucket.sparse) {
      bucket.sparse_gradient = empty_sparse_gradient(tensors_[bucket.parameters.front()]);
    } else if (bucket.memory->any_taken()) {
      const auto old_memory = bucket.memory;
      give_memory(bucket, tensors_, {group_, bucket.views.front().scalar_type(), /*aligned=*/!hook_});
      old_memory->abandon();
    } else {
      at::Tensor(bucket.memory->buffer()).zero_();
    }
  }
  for (Bucket& bucket : buckets_) bucket.pending = 0;
  launch_full();
  try {
    for (Bucket& bucket : buckets_) await(bucket);
    agree_on_used();
  } catch (...) {
    fail_round(std::current_exception());
  }
  // For an optimizer that steps on, on this rank, too: a ZeroRedundancyOptimizer beside the model in a Join.
  for (const Bucket& bucket : buckets_) {
    for (size_t position = 0; position < bucket.parameters.size(); ++position) {
      const size_t index = bucket.parameters[position];
      if (!globally_used_.empty() && !globally_used_[index]) continue;  // it keeps what it had
      put_gradient(index, bucket.sparse ? bucket.sparse_gradient : bucket.views[position]);
    }
  }
  ++rounds_;
  begin_round();
}

}  // namespace lockstep
