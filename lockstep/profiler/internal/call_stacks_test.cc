#include <gmock/gmock.h>
#include <string>
#include <vector>

#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <lockstep/profiler/internal/call_stacks.h>
#include <lockstep/profiler/record_function.h>

namespace lockstep::profiler::internal::call_stacks_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

FunctionEvent event_here(const std::string& name, int64_t start_ns) {
  FunctionEvent one;
  one.name = name;
  one.thread = at::RecordFunction::currentThreadId();
  one.start_ns = start_ns;
  one.end_ns = start_ns + 1;
  return one;
}

TEST(CallStacks, WhereCallsAndEventsDifferInNumberNoneIsGivenAnothersStack) {
  CallStacks stacks;
  for (const char* name : {"both have it", "an event is missing", "an event is missing", "a call is missing"})
    const RecordFunction scope(name);
  stacks.end();
  std::vector<FunctionEvent> events = {event_here("both have it", 0), event_here("an event is missing", 1),
                                       event_here("a call is missing", 2), event_here("a call is missing", 3),
                                       event_here("never called", 4)};
  ::testing::internal::CaptureStderr();
  stacks.give_to(events);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(events[0].stack, Contains(HasSubstr("main")));
  for (size_t i = 1; i < events.size(); ++i) EXPECT_THAT(events[i].stack, IsEmpty()) << events[i].name;
  EXPECT_THAT(log, AllOf(HasSubstr("3 events of the cycle are without their call stacks"),
                         HasSubstr("'an event is missing', which has 1 events and 2 stacks in a thread")));
}

TEST(CallStacks, TheLogIsSilentWhereEachEventHasItsOwn) {
  CallStacks stacks;
  for (int i = 0; i < 3; ++i) const RecordFunction scope("scope");
  stacks.end();
  std::vector<FunctionEvent> events = {event_here("scope", 2), event_here("scope", 0),
                                       event_here("scope", 1)};
  ::testing::internal::CaptureStderr();
  stacks.give_to(events);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("call stacks")));
  for (const FunctionEvent& event : events) EXPECT_THAT(event.stack, Contains(HasSubstr("main")));
}

}  // namespace
}  // namespace lockstep::profiler::internal::call_stacks_test
