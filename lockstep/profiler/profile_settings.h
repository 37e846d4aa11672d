#pragma once

#include <cstdint>
#include <string>

#include <lockstep/profiler/profiler.h>

namespace lockstep::profiler {

/// What LOCKSTEP_PROFILE asks for.
struct ProfileSettings {
  /// One cycle, unless told: a job that runs for days shall not fill the disk.
  ScheduleOptions schedule = {.wait = 1, .warmup = 1, .active = 3, .repeat = 1};
  std::string dir = "./log/profiler";
  bool record_shapes = false;
  bool profile_memory = false;
  bool with_stack = false;
  bool with_flops = false;
  bool gzip = false;
  bool on_signal = false;  ///< each SIGUSR2 asks for the cycles; without one nothing is recorded
  std::string collectives_as = "lockstep";

  ProfilerOptions options() const;
  /// Whether the cycles are over when this step begins.
  bool is_done(int64_t step) const;
};

/// "wait:1,warmup:1,active:3,repeat:1,skip_first:0,shapes,memory,stack,flops,gzip,on_signal,as:gloo,dir=PATH", in any order and
/// of any number, but `dir=` is the last: its value goes to the end. "1" asks for what is there without words. Throws
/// c10::ValueError that names LOCKSTEP_PROFILE, the word, and those that it takes.
ProfileSettings parse_profile_settings(const std::string& text);

}  // namespace lockstep::profiler
