#include <c10/util/Exception.h>

#include <lockstep/base/log.h>
#include <lockstep/profiler/schedule.h>

namespace lockstep::profiler {

Schedule schedule(const ScheduleOptions& options) {
  TORCH_CHECK_VALUE(options.wait >= 0 && options.warmup >= 0 && options.active > 0 && options.repeat >= 0 &&
                        options.skip_first >= 0,
                    "Invalid profiler schedule arguments. Got wait=", options.wait,
                    " (need >= 0), warmup=", options.warmup, " (need >= 0), active=", options.active,
                    " (need > 0), repeat=", options.repeat, " (need >= 0), skip_first=", options.skip_first,
                    " (need >= 0).");
  if (options.warmup == 0) {
    LOCKSTEP_LOG(kInfo)
        << "the profiler's schedule has no warm-up, which makes the first recorded step slower";
  }
  return [options](int64_t step) {
    TORCH_CHECK_VALUE(step >= 0, "Step must be non-negative. Got ", step, ".");
    if (step < options.skip_first) return ProfilerAction::kNone;
    step -= options.skip_first;
    if (options.skip_first_wait) step += options.wait;
    const int64_t cycle = options.wait + options.warmup + options.active;
    if (options.repeat > 0 && step / cycle >= options.repeat) return ProfilerAction::kNone;
    const int64_t place = step % cycle;
    if (place < options.wait) return ProfilerAction::kNone;
    if (place < options.wait + options.warmup) return ProfilerAction::kWarmup;
    return place < cycle - 1 ? ProfilerAction::kRecord : ProfilerAction::kRecordAndSave;
  };
}

}  // namespace lockstep::profiler
