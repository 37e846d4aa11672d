#include <algorithm>

#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/algorithms/hosts/segmented_reduction.h>
#include <lockstep/collectives/algorithms/staging.h>

namespace lockstep::collectives::internal::algorithms::hosts {
namespace {

using transport::GroupChannel;
using transport::HostChannel;
using Flag = HostChannel::Flag;

}  // namespace

SegmentedReduction::SegmentedReduction(GroupChannel& channel, const Terms& terms, const Signature& signature,
                                       const Arithmetic& arithmetic, Agreement& agreement, std::byte* data)
    : channel_(channel),
      host_(channel.host()),
      arithmetic_(arithmetic),
      agreement_(agreement),
      data_(data),
      feedback_(terms.feedback),
      element_(arithmetic.element_size()),
      count_(signature.real_numel()),
      root_(signature.root),
      slices_(channel.layout().slices()),
      owned_slice_(channel.layout().place()) {
  const HostReduction reduction{.hosts = static_cast<int>(channel.layout().hosts.size()),
                                .bytes = count_ * element_,
                                .slices = slices_,
                                .compression = signature.compression(),
                                .to_root = root_ >= 0};
  slice_bytes_ = reduction.slice_bytes();
  segment_ = slice_bytes_ * slices_ / element_;
  segments_ = reduction.segments();
  slice_exchange_ =
      make_slice_exchange(algorithm_for(reduction, terms.wire_model), channel, arithmetic, owned_slice_,
                          root_ < 0 ? -1 : channel.layout().host_of[root_], signature.compression());
  landing_bytes_ = slice_exchange_->landing_bytes(slice_bytes_);
  schedule_ = schedule_of(slice_exchange_->steps());
  crossings_.resize(schedule_.buffers());
}

// `buffers`: that of segment k is free for segment k + buffers. A member stages segment k+1 when k begins, after
// it has fetched k − in_flight − 1; so when all have staged k, all have fetched k − in_flight − 2.
SegmentedReduction::Schedule SegmentedReduction::schedule_of(int steps) {
  const auto rounded_up = [](size_t value, size_t by) { return (value + by - 1) / by; };
  Schedule schedule;
  schedule.lag = rounded_up(lockstep::hosts::kSegmentsInFlight, steps);
  const size_t ticks = steps * schedule.lag;
  schedule.interval = rounded_up(ticks, lockstep::hosts::kSegmentsInFlight);
  schedule.in_flight = rounded_up(ticks, schedule.interval);
  return schedule;
}

size_t SegmentedReduction::elements_of(size_t k) const {
  return std::min(segment_, count_ - k * segment_);
}
Range SegmentedReduction::slice(size_t k, int index) const {
  return slice_of(elements_of(k), element_, slices_, index);
}

// The scratch of each member: what it has staged, then for its slice the partials and what lands beside them.
size_t SegmentedReduction::scratch_bytes() const {
  return schedule_.buffers() * (segment_ * element_ + slice_bytes_ + landing_bytes_);
}
std::byte* SegmentedReduction::staged(int place, size_t k) {
  return agreement_.scratch_of(place) + k % schedule_.buffers() * segment_ * element_;
}
std::byte* SegmentedReduction::partial(int place, size_t k) {
  return agreement_.scratch_of(place) + schedule_.buffers() * segment_ * element_ +
         k % schedule_.buffers() * (slice_bytes_ + landing_bytes_);
}

std::byte* SegmentedReduction::memory(int place, size_t k) {
  return (place == host_.rank() ? data_ : host_.memory(place)) + k * segment_ * element_;
}

void SegmentedReduction::run() {
  host_.expect_messages(count_ * element_);
  in_place_ = host_.size() == 1 || host_.all_have_memory();
  const size_t behind = schedule_.in_flight + 1;
  if (!in_place_) stage(0);
  for (size_t turn = 0; turn < segments_ + behind; ++turn) {
    if (!in_place_) {
      if (turn >= behind) fetch(turn - behind);
      if (turn + 1 < segments_) stage(turn + 1);
    }
    if (!owns()) continue;
    for (size_t i = 0; i < schedule_.interval; ++i) exchange(turn * schedule_.interval + i);
  }
  host_.add_chunks(segments_);
}

void SegmentedReduction::stage(size_t k) {
  copy_bytes(staged(host_.rank(), k), memory(host_.rank(), k), elements_of(k) * element_);
  host_.publish(Flag::kStaged, number(k));
}

/// What this tick brings for each segment on its way, from the oldest on.
void SegmentedReduction::exchange(size_t tick) {
  const size_t newest = tick / schedule_.interval;
  const size_t oldest = newest - std::min(newest, schedule_.in_flight);
  const auto steps = static_cast<size_t>(slice_exchange_->steps());
  for (size_t k = oldest; k <= newest && k < segments_; ++k) {
    const size_t age = tick - k * schedule_.interval;
    if (age % schedule_.lag != 0 || age / schedule_.lag > steps) continue;
    const int step = static_cast<int>(age / schedule_.lag);
    Crossing& crossing = crossings_[k % crossings_.size()];
    if (step == 0) {
      begin(k);
    } else {
      channel_.await(crossing.requests);
      crossing.requests.clear();
      slice_exchange_->complete(step - 1, crossing);
    }
    if (static_cast<size_t>(step) < steps) {
      slice_exchange_->post(step, crossing);
    } else {
      end(k);
    }
  }
}

/// Reduces the own slice of the host.
void SegmentedReduction::begin(size_t k) {
  if (!in_place_) host_.await_all(Flag::kStaged, number(k));
  const Range own = slice(k, owned_slice_);
  Crossing& crossing = crossings_[k % crossings_.size()];
  crossing.partial = partial(host_.rank(), k);
  crossing.landing = crossing.partial + slice_bytes_;
  crossing.count = own.count;
  if (feedback_ != nullptr) find_errors(k, crossing);
  std::vector<const void*> inputs;
  for (int place = 0; place < host_.size(); ++place) {
    inputs.push_back((in_place_ ? memory(place, k) : staged(place, k)) + own.begin * element_);
  }
  failpoint::here("reduce");
  arithmetic_.partial(crossing.partial, inputs.data(), inputs.size(), own.count);
}

void SegmentedReduction::find_errors(size_t k, Crossing& crossing) {
  const size_t full = slice(0, owned_slice_).count;
  const size_t last = slice(segments_ - 1, owned_slice_).count;
  const size_t full_results = slice_exchange_->encoded_results(full);
  const size_t last_results = slice_exchange_->encoded_results(last);
  const int64_t divisor = arithmetic_.divisor();
  crossing.partial_errors = feedback_->of_partial((segments_ - 1) * full + last, divisor) + k * full;
  crossing.result_errors =
      feedback_->of_result((segments_ - 1) * full_results + last_results, divisor) + k * full_results;
}

/// Gives the members the result of the own slice.
void SegmentedReduction::end(size_t k) {
  if (!in_place_) return host_.publish(Flag::kReduced, number(k));
  const Range own = slice(k, owned_slice_);
  for (int place = 0; place < host_.size(); ++place) {
    if (!wants_result(channel_.layout().neighbours()[place])) continue;
    copy_bytes(memory(place, k) + own.begin * element_, partial(host_.rank(), k), own.count * element_);
  }
}

void SegmentedReduction::fetch(size_t k) {
  for (int owner = 0; owner < slices_; ++owner) {
    host_.await_rank(Flag::kReduced, owner, number(k));
    if (!wants_result(channel_.rank())) continue;
    const Range range = slice(k, owner);
    copy_bytes(memory(host_.rank(), k) + range.begin * element_, partial(owner, k), range.count * element_);
  }
}

}  // namespace lockstep::collectives::internal::algorithms::hosts
