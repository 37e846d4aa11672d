#include <algorithm>
#include <utility>

#include <lockstep/base/deadline.h>
#include <lockstep/base/log.h>
#include <lockstep/base/text/format_duration.h>
#include <lockstep/checkpoint/internal/save_schedule.h>

namespace lockstep::checkpoint::internal {
namespace {

using std::chrono::nanoseconds;

// With `automatic`, before anything was measured, and the least that there ever is between two saves.
constexpr nanoseconds kFirstAutomatic = std::chrono::minutes(1);
constexpr nanoseconds kLeastAutomatic = std::chrono::seconds(10);
// A bound in steps, for a clock that does not advance: a checkpoint is then written all the same.
constexpr int64_t kMostStepsAhead = 10'000;

}  // namespace

SaveSchedule::SaveSchedule(const CheckpointManagerOptions& options, bool leads, Agree agree)
    : options_(options), leads_(leads), agree_(std::move(agree)) {}

std::optional<nanoseconds> SaveSchedule::interval() const {
  std::optional<nanoseconds> interval;
  if (options_.automatic) {
    interval = kFirstAutomatic;
    if (cost_) {
      const auto by_share = std::chrono::duration<double>(to_seconds(*cost_) / options_.automatic_share);
      // No more than half of the time is one being written.
      interval = std::max({std::chrono::duration_cast<nanoseconds>(by_share), 2 * whole_, kLeastAutomatic});
    }
  }
  if (options_.every > nanoseconds(0)) interval = std::min(interval.value_or(options_.every), options_.every);
  return interval;
}

bool SaveSchedule::due_at_step(int64_t step, Clock::time_point now) {
  bool due = options_.every_steps > 0 && step > 0 && step % options_.every_steps == 0;
  if ((options_.automatic || options_.every > nanoseconds(0)) && (!next_look_ || step >= *next_look_)) {
    const Look agreed = agree_(leads_ ? look(step, now) : Look{});
    due = due || agreed.save;
    next_look_ = agreed.next_step;
  }
  return due && last_saved_step_ != step;
}

bool SaveSchedule::due_at_epoch(int64_t epoch) {
  const bool due = options_.every_epochs > 0 && epoch > 0 && epoch % options_.every_epochs == 0;
  return due && std::exchange(last_epoch_, epoch) != epoch;
}

SaveSchedule::Look SaveSchedule::look(int64_t step, Clock::time_point now) {
  if (!last_saved_) last_saved_ = now;
  const nanoseconds left = *interval() - (now - *last_saved_);
  Look look{.save = left <= nanoseconds(0), .next_step = step + 1};
  if (last_look_ && step > last_look_->first) {
    const double per_step =
        to_seconds(now - last_look_->second) / static_cast<double>(step - last_look_->first);
    const double until = look.save ? to_seconds(*interval()) : to_seconds(left);
    const double steps = per_step > 0 ? until / per_step / 2 : static_cast<double>(kMostStepsAhead);
    look.next_step =
        step + static_cast<int64_t>(std::clamp(steps, 1.0, static_cast<double>(kMostStepsAhead)));
  }
  last_look_ = {step, now};
  return look;
}

void SaveSchedule::saved(int64_t step, Clock::time_point now, nanoseconds held_up) {
  last_saved_step_ = step;
  last_saved_ = now;
  const bool first = !cost_;
  // Of several the mean, with more weight on the last ones: the disk may have become busier.
  cost_ = first ? held_up : (*cost_ + held_up) / 2;
  if (options_.automatic && leads_) {
    LOCKSTEP_LOG(kInfo) << "saving a checkpoint holds the training up for " << format_duration(*cost_)
                        << ", so at a share of " << 100 * options_.automatic_share << " % one is saved every "
                        << format_duration(*interval());
  }
}

void SaveSchedule::also_held_up(nanoseconds held_up) {
  if (cost_) *cost_ += held_up;
}

void SaveSchedule::written(nanoseconds took) {
  whole_ = took;
}

}  // namespace lockstep::checkpoint::internal
