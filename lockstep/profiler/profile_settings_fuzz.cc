// Any text as LOCKSTEP_PROFILE: settings whose schedule can be made, or a ValueError.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/profiler/profile_settings.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::profile_settings_fuzz {
namespace {

std::vector<std::string> seeds() {
  return {"1", "wait:1,warmup:1,active:3,dir=./log/profiler",
          "wait:0,warmup:0,active:1000000000,repeat:1000000000,skip_first:1000000000,shapes,memory,stack,"
          "flops,gzip,on_signal,"
          "as:nccl,dir=x"};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(profile_settings, seeds) {
  try {
    const auto settings =
        profiler::parse_profile_settings(std::string(reinterpret_cast<const char*>(data), size));
    const auto when = profiler::schedule(settings.schedule);
    for (int64_t step = 0; step < 3; ++step) when(step);
    if (settings.is_done(0) || settings.dir.empty()) std::abort();
  } catch (const c10::ValueError&) {
  }
  return 0;
}

}  // namespace lockstep::profile_settings_fuzz
