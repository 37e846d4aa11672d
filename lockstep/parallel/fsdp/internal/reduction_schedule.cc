#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/parallel/fsdp/internal/reduction_schedule.h>

namespace lockstep::fsdp::internal {

ReductionSchedule::ReductionSchedule(std::vector<size_t> parts, size_t slots)
    : parts_(std::move(parts)), slots_(slots), started_(parts_.size()), here_(parts_.size()) {
  for (size_t group = parts_.size(); group-- > 0;) order_.push_back(group);
}

void ReductionSchedule::begin() {
  TORCH_INTERNAL_ASSERT(is_done(), "the reductions of the last backward are not done");
  ended_ = false;
  started_ = 0;
  arrivals_.clear();
  std::fill(here_.begin(), here_.end(), false);
}

void ReductionSchedule::arrived(size_t group) {
  if (here_.at(group)) return;
  here_[group] = true;
  arrivals_.push_back(group);
}

void ReductionSchedule::end() {
  ended_ = true;
}

std::optional<ReductionSchedule::Start> ReductionSchedule::next() {
  if (!next_is_here() || in_progress_.size() == slots_) return std::nullopt;
  const size_t group = order_[started_];
  size_t slot = 0;  // the lowest that is free
  while (std::ranges::count(in_progress_, slot) > 0) ++slot;
  in_progress_.push_back(slot);
  const size_t part = started_parts_++;
  if (started_parts_ == parts_[group]) {
    ++started_;
    started_parts_ = 0;
  }
  return Start{.group = group, .part = part, .slot = slot};
}

void ReductionSchedule::finished(size_t slot) {
  const auto found = std::ranges::find(in_progress_, slot);
  TORCH_INTERNAL_ASSERT(found != in_progress_.end());
  in_progress_.erase(found);
}

std::optional<size_t> ReductionSchedule::oldest() const {
  if (in_progress_.empty()) return std::nullopt;
  return in_progress_.front();
}

std::vector<size_t> ReductionSchedule::order_of_arrival() const {
  std::vector<size_t> order = arrivals_;
  for (const size_t group : order_) {
    if (!here_[group]) order.push_back(group);
  }
  return order;
}

void ReductionSchedule::set_order(std::vector<size_t> order) {
  TORCH_INTERNAL_ASSERT(is_done() && std::ranges::is_permutation(order, order_));
  order_ = std::move(order);
  started_ = order_.size();
}

}  // namespace lockstep::fsdp::internal
