#pragma once

#include <cstdint>
#include <functional>

/// When to profile: torch.profiler.schedule.
namespace lockstep::profiler {

/// What the profiler does in a step. torch.profiler.ProfilerAction.
enum class ProfilerAction {
  kNone,
  kWarmup,         ///< what is needed for recording is made ready; nothing of the step is kept
  kRecord,         ///< the step is recorded
  kRecordAndSave,  ///< so, and is its cycle's last: on_trace_ready is called at its end
};

/// What is done in a step, which are counted from 0.
using Schedule = std::function<ProfilerAction(int64_t step)>;

struct ScheduleOptions {
  int64_t wait = 0;              ///< steps at the begin of each cycle in which nothing is done,
  int64_t warmup = 0;            ///< then of warm-up,
  int64_t active = 1;            ///< then those that are recorded
  int64_t repeat = 0;            ///< cycles; 0: as long as there are steps
  int64_t skip_first = 0;        ///< steps before the first cycle
  bool skip_first_wait = false;  ///< the first cycle has no wait
};

/// Throws c10::ValueError for negative numbers, and for `active` 0. Without a warm-up the first steps that are recorded
/// are slower than others, which the log says. The schedule throws c10::ValueError for a negative step.
Schedule schedule(const ScheduleOptions& options);

}  // namespace lockstep::profiler
