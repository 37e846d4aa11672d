#include <gmock/gmock.h>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/profiler/event_list.h>
#include <lockstep/testing/message_of.h>

// parity/profiler_test.py compares averages and tables with torch's.
namespace lockstep::profiler::event_list_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::Not;

FunctionEvent event(const std::string& name, int64_t start_us, int64_t end_us, uint64_t thread = 1) {
  FunctionEvent one;
  one.name = name;
  one.thread = thread;
  one.start_ns = start_us * 1000;
  one.end_ns = end_us * 1000;
  return one;
}

std::vector<std::string> names(const std::vector<FunctionEvent>& events) {
  std::vector<std::string> all;
  for (const FunctionEvent& one : events) all.push_back(one.name);
  return all;
}

TEST(EventList, WhoLiesWithinWhomIsACalleeInOneThreadOnly) {
  std::vector<FunctionEvent> events = {event("inner", 2, 4), event("outer", 0, 10), event("other", 3, 4, 2),
                                       event("crossing", 8, 12)};
  build_tree(events);
  EXPECT_THAT(names(events), ElementsAre("outer", "inner", "other", "crossing"));
  EXPECT_THAT(events[0].children, ElementsAre(1));
  EXPECT_EQ(events[1].parent, 0);
  EXPECT_EQ(events[2].parent, -1);
  EXPECT_EQ(events[3].parent, -1) << "overlaps in part, so neither calls the other";
}

TEST(EventList, AWrapperOfItsOwnNameStandsForBoth) {
  std::vector<FunctionEvent> events = {event("add", 0, 10), event("add", 1, 9), event("empty", 2, 3)};
  build_tree(events);
  EXPECT_THAT(names(events), ElementsAre("add", "empty"));
  EXPECT_THAT(events[0].children, ElementsAre(1));
  EXPECT_EQ(events[1].parent, 0);
}

TEST(EventList, BackwardFunctionsHaveTheStackOfTheirForward) {
  FunctionEvent forward = event("mm", 0, 1);
  forward.sequence_nr = 7;
  forward.stack = {"net.cc(3): forward"};
  FunctionEvent backward = event("MmBackward0", 5, 9, 2);
  backward.scope = 1;
  backward.sequence_nr = 7;
  backward.fwd_thread = 1;
  backward.stack = {"somewhere in the engine"};
  std::vector<FunctionEvent> events = {forward, backward, event("mm", 6, 7, 2)};
  build_tree(events);
  EXPECT_THAT(events[1].stack, ElementsAre("net.cc(3): forward"));
  EXPECT_THAT(events[2].stack, ElementsAre("net.cc(3): forward"));
}

TEST(EventList, AveragesTellCallsApartAsAsked) {
  std::vector<FunctionEvent> events = {event("mm", 0, 4), event("empty", 1, 2), event("mm", 10, 12)};
  events[0].input_shapes = {{2, 3}, {3, 4}};
  events[2].input_shapes = {{1, 3}, {3, 4}};
  build_tree(events);
  const KeyAverages by_name = key_averages(events, {}, {});
  ASSERT_EQ(by_name.size(), 2);
  EXPECT_EQ(by_name[0].count, 2);
  EXPECT_EQ(by_name[0].cpu_time_total, 6);
  EXPECT_EQ(by_name[0].self_cpu_time_total, 5);
  EXPECT_EQ(by_name[0].cpu_time(), 3);
  EXPECT_FALSE(by_name[0].input_shapes);
  const KeyAverages by_shape = key_averages(events, {.group_by_input_shape = true}, {});
  EXPECT_EQ(by_shape.size(), 3);
  EXPECT_THAT(by_shape.table(), HasSubstr("[[2, 3], [3, 4]]"));
}

TEST(EventList, TablesAreSortedAndCut) {
  std::vector<FunctionEvent> events = {event("short", 0, 1), event("long", 2, 9)};
  build_tree(events);
  const std::string table = key_averages(events, {}, {}).table({.sort_by = "cpu_time_total", .row_limit = 1});
  EXPECT_THAT(table, HasSubstr("long"));
  EXPECT_THAT(table, Not(HasSubstr("short")));
  EXPECT_THAT(table, HasSubstr("Self CPU time total: 8.000us"));
  EXPECT_THAT(KeyAverages().table(), IsEmpty());
}

TEST(EventList, RefusesUnknownColumns) {
  std::vector<FunctionEvent> events = {event("a", 0, 1), event("b", 0, 1)};
  const KeyAverages averages = key_averages(events, {}, {});
  EXPECT_THAT(message_of<c10::ValueError>([&] { averages.table({.sort_by = "wall"}); }), HasSubstr("'wall'"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { averages.table({.time_unit = "ns"}); }), HasSubstr("'ns'"));
}

}  // namespace
}  // namespace lockstep::profiler::event_list_test
