#include <gmock/gmock.h>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/profiler/schedule.h>
#include <lockstep/testing/message_of.h>

// parity/profiler_test.py compares schedules with torch's.
namespace lockstep::profiler::schedule_test {
namespace {

using enum ProfilerAction;
using lockstep::testing::message_of;
using ::testing::HasSubstr;

std::vector<ProfilerAction> actions(const ScheduleOptions& options, int64_t steps) {
  const Schedule when = schedule(options);
  std::vector<ProfilerAction> all;
  for (int64_t step = 0; step < steps; ++step) all.push_back(when(step));
  return all;
}

TEST(Schedule, OfTheArticles) {
  EXPECT_EQ(actions({.wait = 1, .warmup = 1, .active = 3, .repeat = 2}, 12),
            (std::vector{kNone, kWarmup, kRecord, kRecord, kRecordAndSave, kNone, kWarmup, kRecord, kRecord,
                         kRecordAndSave, kNone, kNone}));
}

TEST(Schedule, SkipsStepsBeforeTheFirstCycleAndItsWait) {
  EXPECT_EQ(actions({.wait = 2, .warmup = 1, .active = 1, .skip_first = 1, .skip_first_wait = true}, 7),
            (std::vector{kNone, kWarmup, kRecordAndSave, kNone, kNone, kWarmup, kRecordAndSave}));
}

TEST(Schedule, RefusesWhatMakesNoSense) {
  const std::string message = message_of<c10::ValueError>([] { schedule({.wait = -1, .active = 0}); });
  EXPECT_THAT(message, HasSubstr("wait=-1"));
  EXPECT_THAT(message, HasSubstr("active=0"));
  const Schedule when = schedule({});
  EXPECT_THAT(message_of<c10::ValueError>([&] { when(-1); }), HasSubstr("non-negative"));
}

}  // namespace
}  // namespace lockstep::profiler::schedule_test
