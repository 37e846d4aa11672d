#include <algorithm>
#include <map>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/profiler/profile_settings.h>

namespace lockstep::profiler {
namespace {

constexpr const char* kVariable = "LOCKSTEP_PROFILE";

[[noreturn]] void refuse_word(const std::string& word) {
  TORCH_CHECK_VALUE(
      false, kVariable, " has '", word,
      "'; it takes wait:N, warmup:N, active:N, repeat:N, skip_first:N, shapes, memory, stack, flops, "
      "gzip, on_signal, as:lockstep|gloo|nccl, and as the last dir=PATH, with commas between them: "
      "wait:1,warmup:1,active:3,dir=./log/profiler, which 1 means, too. N is a whole number up to a billion, "
      "of active at least 1. An empty variable records nothing");
}

}  // namespace

ProfilerOptions ProfileSettings::options() const {
  return {.schedule = profiler::schedule(schedule),
          .on_trace_ready = tensorboard_trace_handler(dir, {}, gzip),
          .record_shapes = record_shapes,
          .profile_memory = profile_memory,
          .with_stack = with_stack,
          .with_flops = with_flops,
          .collectives_as = collectives_as};
}

bool ProfileSettings::is_done(int64_t step) const {
  const int64_t cycle = schedule.wait + schedule.warmup + schedule.active;
  return schedule.repeat > 0 && step >= schedule.skip_first + cycle * schedule.repeat;
}

ProfileSettings parse_profile_settings(const std::string& text) {
  ProfileSettings settings;
  const std::map<std::string, int64_t ScheduleOptions::*> numbers = {
      {"wait", &ScheduleOptions::wait},
      {"warmup", &ScheduleOptions::warmup},
      {"active", &ScheduleOptions::active},
      {"repeat", &ScheduleOptions::repeat},
      {"skip_first", &ScheduleOptions::skip_first}};
  const std::map<std::string, bool ProfileSettings::*> switches = {
      {"shapes", &ProfileSettings::record_shapes},
      {"memory", &ProfileSettings::profile_memory},
      {"stack", &ProfileSettings::with_stack},
      {"flops", &ProfileSettings::with_flops},
      {"gzip", &ProfileSettings::gzip},
      {"on_signal", &ProfileSettings::on_signal}};
  constexpr int64_t kMost = 1'000'000'000;  // so that sums and products of them don't overflow
  for (size_t at = text == "1" ? text.size() : 0; at < text.size();) {
    if (text.compare(at, 4, "dir=") == 0) {
      settings.dir = text.substr(at + 4);
      if (settings.dir.empty()) refuse_word("dir=");
      break;
    }
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string word = text.substr(at, comma - at);
    at = comma + 1;
    const size_t colon = word.find(':');
    const std::string name = word.substr(0, colon);
    if (colon == std::string::npos) {
      const auto found = switches.find(name);
      if (found == switches.end()) refuse_word(word);
      settings.*found->second = true;
      continue;
    }
    const std::string value = word.substr(colon + 1);
    if (name == "as" && (value == "lockstep" || value == "gloo" || value == "nccl")) {
      settings.collectives_as = value;
      continue;
    }
    const auto found = numbers.find(name);
    if (found == numbers.end()) refuse_word(word);
    try {
      settings.schedule.*found->second =
          environment::parse_integer(kVariable, value, name == "active" ? 1 : 0, kMost);
    } catch (const c10::Error&) {
      refuse_word(word);
    }
  }
  return settings;
}

}  // namespace lockstep::profiler
