#include <algorithm>
#include <gmock/gmock.h>
#include <numeric>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/parallel/fsdp/internal/reduction_schedule.h>

namespace lockstep::fsdp::internal::reduction_schedule_test {
namespace {

using ::testing::ElementsAre;

/// What a rank starts in one backward in which gradients come in this order; groups that are not in it have none.
/// Reductions finish as late as possible, or at once.
std::vector<ReductionSchedule::Start> starts(ReductionSchedule& schedule, const std::vector<size_t>& arrivals,
                                             bool late) {
  std::vector<ReductionSchedule::Start> answer;
  const auto run = [&] {
    while (const auto start = schedule.next()) {
      answer.push_back(*start);
      if (!late) schedule.finished(start->slot);
    }
  };
  schedule.begin();
  for (const size_t group : arrivals) {
    schedule.arrived(group);
    run();
  }
  schedule.end();
  run();
  while (!schedule.is_done()) {
    const auto oldest = schedule.oldest();
    if (!oldest) {
      ADD_FAILURE() << "nothing is in progress, and yet not all is done";
      break;
    }
    schedule.finished(*oldest);
    run();
  }
  return answer;
}

std::vector<size_t> groups_of(const std::vector<ReductionSchedule::Start>& starts) {
  std::vector<size_t> groups;
  for (const auto& start : starts) groups.push_back(start.group);
  return groups;
}

// All orders of arrival, any groups missing, any number of buffers: the same reductions in the same order.
TEST(ReductionSchedule, FollowsOneOrderWhateverTheOrderOfArrival) {
  constexpr size_t kGroups = 5;
  for (size_t slots = 1; slots <= kGroups + 1; ++slots) {
    std::vector<size_t> arrivals(kGroups);
    std::iota(arrivals.begin(), arrivals.end(), 0);
    do {
      for (size_t missing = 0; missing <= kGroups; ++missing) {
        const std::vector<size_t> come(arrivals.begin(), arrivals.end() - static_cast<int64_t>(missing));
        for (const bool late : {false, true}) {
          ReductionSchedule schedule(std::vector<size_t>(kGroups, 1), slots);
          ASSERT_THAT(groups_of(starts(schedule, come, late)), ElementsAre(4, 3, 2, 1, 0));
          const auto order = schedule.order_of_arrival();
          ASSERT_TRUE(std::equal(come.begin(), come.end(), order.begin()));
          schedule.set_order({2, 0, 1, 4, 3});
          const auto second = starts(schedule, come, late);
          ASSERT_THAT(groups_of(second), ElementsAre(2, 0, 1, 4, 3));
          for (const auto& start : second) ASSERT_LT(start.slot, slots);
        }
      }
    } while (std::next_permutation(arrivals.begin(), arrivals.end()));
  }
}

TEST(ReductionSchedule, ABufferIsNotUsedAgainBeforeItIsFree) {
  ReductionSchedule schedule({1, 1, 1}, 2);
  schedule.begin();
  for (const size_t group : {0, 1, 2}) schedule.arrived(group);
  const auto first = schedule.next(), second = schedule.next();
  ASSERT_TRUE(first && second);
  EXPECT_NE(first->slot, second->slot);
  EXPECT_FALSE(schedule.next());
  EXPECT_TRUE(schedule.waits_for_a_slot());
  EXPECT_EQ(schedule.oldest(), first->slot);
  schedule.finished(second->slot);
  EXPECT_EQ(schedule.next()->slot, second->slot);
  EXPECT_FALSE(schedule.is_done());
}

TEST(ReductionSchedule, AGroupsPartsComeOneAfterTheOther) {
  for (size_t slots = 1; slots <= 5; ++slots) {
    for (const bool late : {false, true}) {
      ReductionSchedule schedule({1, 3, 2}, slots);
      std::vector<std::pair<size_t, size_t>> parts;
      for (int backward = 0; backward < 2; ++backward) {
        for (const auto& start : starts(schedule, {1, 2, 0}, late))
          parts.emplace_back(start.group, start.part);
        schedule.set_order({1, 2, 0});
      }
      using Part = std::pair<size_t, size_t>;
      ASSERT_THAT(parts,
                  ElementsAre(Part(2, 0), Part(2, 1), Part(1, 0), Part(1, 1), Part(1, 2), Part(0, 0),  //
                              Part(1, 0), Part(1, 1), Part(1, 2), Part(2, 0), Part(2, 1), Part(0, 0)));
    }
  }
}

TEST(ReductionSchedule, StartsWhileOthersAreStillToCome) {
  ReductionSchedule schedule({1, 1, 1}, 2);
  schedule.begin();
  schedule.arrived(0);
  EXPECT_FALSE(schedule.next()) << "2 comes first";
  schedule.arrived(2);
  schedule.arrived(2);
  EXPECT_EQ(schedule.next()->group, 2U);
  EXPECT_FALSE(schedule.next());
}

}  // namespace
}  // namespace lockstep::fsdp::internal::reduction_schedule_test
