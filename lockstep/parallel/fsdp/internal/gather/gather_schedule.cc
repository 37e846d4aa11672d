#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/parallel/fsdp/internal/gather/gather_schedule.h>

namespace lockstep::fsdp::internal {

GatherSchedule::GatherSchedule(size_t units, size_t most, bool forward_prefetch,
                               std::optional<BackwardPrefetch> backward_prefetch)
    : units_(units), most_(most), forward_prefetch_(forward_prefetch), backward_prefetch_(backward_prefetch) {
  TORCH_INTERNAL_ASSERT(most >= 2);
}

GatherSchedule::Steps GatherSchedule::begin(GatherPass pass, bool keeps_all) {
  Steps steps;
  prefetch_after_gradients(steps);
  if (pass == GatherPass::kForward) in_forward_ = true;
  Order& begun = pass == GatherPass::kForward ? forward_ : backward_;
  begun.now.clear();
  begun.follows = true;
  begun.keeps_all = keeps_all;
  current_.reset();
  next_.reset();
  return steps;
}

GatherSchedule::Steps GatherSchedule::end(GatherPass pass) {
  Steps steps;
  prefetch_after_gradients(steps);
  Order& ended = pass == GatherPass::kForward ? forward_ : backward_;
  ended.last = std::exchange(ended.now, {});
  if (pass == GatherPass::kForward) in_forward_ = false;
  current_.reset();
  next_.reset();
  return steps;
}

GatherSchedule::Steps GatherSchedule::use(size_t unit) {
  Unit& used = units_[unit];
  const bool counts_as_whole = used.phase == UnitPhase::kWhole || used.phase == UnitPhase::kFreedEarly;
  const bool goes_on = current_ == unit && counts_as_whole;
  Steps steps;
  if (!goes_on) prefetch_after_gradients(steps);
  ++used.users;
  used.last_use = ++uses_;
  if (used.phase == UnitPhase::kFreedEarly) {
    start(steps, unit);
    finish(steps, unit);
  }
  if (goes_on) return steps;
  current_ = unit;
  if (used.phase == UnitPhase::kSharded) {
    make_room(steps);
    start(steps, unit);
  }
  if (used.phase == UnitPhase::kGathering) finish(steps, unit);
  next_ = next_after(unit);
  const bool early = in_forward_ ? forward_prefetch_ : backward_prefetch_ == BackwardPrefetch::BACKWARD_PRE;
  if (early) prefetch(steps);
  return steps;
}

GatherSchedule::Steps GatherSchedule::gradients_are_complete(size_t unit, bool may_be_used_again) {
  Steps steps;
  Unit& done = units_[unit];
  if (!may_be_used_again && done.phase == UnitPhase::kWhole && done.users == 0) {
    steps.push_back({GatherStep::Kind::kFree, unit});
    done.phase = UnitPhase::kFreedEarly;
  }
  prefetch_after_gradients(steps);
  return steps;
}

GatherSchedule::Steps GatherSchedule::free_all() {
  Steps steps;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].phase == UnitPhase::kGathering) finish(steps, unit);
    if (units_[unit].phase != UnitPhase::kSharded && units_[unit].users == 0) free(steps, unit);
  }
  return steps;
}

std::optional<size_t> GatherSchedule::next_after(size_t unit) {
  Order& in = order();
  const size_t place = in.now.size();
  in.now.push_back(unit);
  in.follows = in.follows && place < in.last.size() && in.last[place] == unit;
  if (!in.follows || place + 1 == in.last.size()) return std::nullopt;
  return in.last[place + 1];
}

void GatherSchedule::prefetch(Steps& steps) {
  if (next_ && units_[*next_].phase == UnitPhase::kSharded && make_room(steps)) start(steps, *next_);
}

/// BACKWARD_POST; at the latest before backward goes on with another unit or ends, for a rank may lack the gradients.
void GatherSchedule::prefetch_after_gradients(Steps& steps) {
  if (!in_forward_ && backward_prefetch_ == BackwardPrefetch::BACKWARD_POST) prefetch(steps);
}

bool GatherSchedule::make_room(Steps& steps) {
  if (order().keeps_all) return true;
  const auto is_here = [](const Unit& unit) { return unit.phase != UnitPhase::kSharded; };
  while (static_cast<size_t>(std::ranges::count_if(units_, is_here)) >= most_) {
    std::optional<size_t> oldest;
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      if (!is_here(units_[unit]) || units_[unit].users > 0 || unit == current_) continue;
      if (!oldest || units_[unit].last_use < units_[*oldest].last_use) oldest = unit;
    }
    if (!oldest) return false;
    if (units_[*oldest].phase == UnitPhase::kGathering) finish(steps, *oldest);
    free(steps, *oldest);
  }
  return true;
}

void GatherSchedule::start(Steps& steps, size_t unit) {
  units_[unit].phase = UnitPhase::kGathering;
  steps.push_back({GatherStep::Kind::kStart, unit});
}

void GatherSchedule::finish(Steps& steps, size_t unit) {
  units_[unit].phase = UnitPhase::kWhole;
  steps.push_back({GatherStep::Kind::kFinish, unit});
}

void GatherSchedule::free(Steps& steps, size_t unit) {
  const UnitPhase before = std::exchange(units_[unit].phase, UnitPhase::kSharded);
  if (before == UnitPhase::kWhole) steps.push_back({GatherStep::Kind::kFree, unit});
  if (current_ == unit) current_.reset();
}

}  // namespace lockstep::fsdp::internal
