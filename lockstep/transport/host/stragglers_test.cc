#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/transport/host/stragglers.h>

namespace lockstep::transport::stragglers_test {
namespace {

/// Milliseconds a step.
struct Milliseconds {
  double data = 0, forward = 0, backward = 0, waiting = 0, optimizer = 0;
};

/// Of the ranks 0, 1, …
std::vector<RankPhases> told(const std::vector<Milliseconds>& ranks) {
  std::vector<RankPhases> all;
  for (const Milliseconds& each : ranks) {
    PhaseTimes times;
    times.phases = {0,
                    each.data * 1e6,
                    each.forward * 1e6,
                    each.backward * 1e6,
                    each.waiting * 1e6,
                    each.optimizer * 1e6};
    times.own = (each.data + each.forward + each.backward + each.optimizer) * 1e6;
    times.step = times.own + each.waiting * 1e6;
    all.push_back({static_cast<int>(all.size()), times});
  }
  return all;
}

/// "1 forward", or "" where no rank is slow.
std::string slow_of(const std::vector<Milliseconds>& ranks) {
  const auto found = find_straggler(told(ranks));
  return found ? std::to_string(found->rank) + " " + to_string(found->phase) : "";
}

TEST(Straggler, IsTheRankForWhichTheOthersWait) {
  EXPECT_EQ(slow_of({{1, 10, 10, 20, 1}, {1, 30, 10, 0, 1}}), "1 forward");
  EXPECT_EQ(slow_of({{21, 10, 10, 0, 1}, {1, 10, 10, 20, 1}, {1, 10, 10, 20, 1}}), "0 data");
  EXPECT_EQ(slow_of({{1, 10, 10, 21, 1}, {1, 10, 30, 1, 1}, {1, 10, 10, 21, 1}, {1, 10, 10, 21, 1}}),
            "1 backward");
  EXPECT_EQ(slow_of({{1, 10, 10, 20, 1}, {1, 10, 10, 0, 21}}), "1 optimizer");
}

TEST(Straggler, OfTwoTheSlower) {
  EXPECT_EQ(slow_of({{0, 50, 0, 0, 0}, {0, 45, 0, 5, 0}, {0, 10, 0, 40, 0}, {0, 10, 0, 40, 0}}), "0 forward");
}

TEST(Straggler, IsNoneWhereMostTakeAsLong) {
  EXPECT_EQ(slow_of({{1, 10, 10, 0, 1}, {1, 10, 10, 0, 1}}), "");
  EXPECT_EQ(slow_of({{0, 10, 0, 40, 0}, {0, 50, 0, 0, 0}, {0, 50, 0, 0, 0}}), "") << "one is fast";
  EXPECT_EQ(slow_of({{0, 50, 0, 0, 0}, {0, 50, 0, 0, 0}, {0, 10, 0, 40, 0}, {0, 10, 0, 40, 0}}), "0 forward")
      << "half are slow: the first of them";
}

TEST(Straggler, IsNoneBelowAFifthOfTheStep) {
  EXPECT_EQ(slow_of({{0, 81, 0, 19, 0}, {0, 100, 0, 0, 0}}), "");
  EXPECT_EQ(slow_of({{0, 79, 0, 21, 0}, {0, 100, 0, 0, 0}}), "1 forward");
}

TEST(Straggler, IsNoneWhereNoRankWaits) {
  EXPECT_EQ(slow_of({{0, 10, 0, 0, 0}, {0, 100, 0, 0, 0}}), "") << "ranks that train by themselves";
  EXPECT_EQ(slow_of({{0, 95, 0, 0, 0}, {0, 100, 0, 0, 0}}), "");
  EXPECT_EQ(slow_of({{0, 100, 0, 0, 0}}), "") << "one rank";
  EXPECT_EQ(slow_of({}), "");
  EXPECT_EQ(slow_of({{0, 70, 0, 30, 0}, {0, 100, 0, 25, 0}}), "") << "they don't take steps together";
  EXPECT_EQ(slow_of({{0, 10, 0, 10, 0}, {0, 20, 0, 0, 0}, {0, 500, 0, 0, 0}, {0, 500, 0, 0, 0}}), "1 forward")
      << "two trainings beside each other: of the first one";
}

TEST(Straggler, OfNothingButZeros) {
  EXPECT_EQ(slow_of({{}, {}}), "");
}

const std::vector<Milliseconds> kEven = {{1, 10, 10, 0, 1}, {1, 10, 10, 0, 1}};
const std::vector<Milliseconds> kSlowForward = {{1, 10, 10, 20, 1}, {1, 30, 10, 0, 1}};
const std::vector<Milliseconds> kSlowBackward = {{1, 10, 10, 20, 1}, {1, 10, 30, 0, 1}};

TEST(StragglerWatch, SaysItOnceAndAgainWhenItHasChanged) {
  StragglerWatch watch;
  EXPECT_FALSE(watch.look(told(kEven)));
  auto change = watch.look(told(kSlowForward));
  ASSERT_TRUE(change && change->slow);
  EXPECT_EQ(change->slow->rank, 1);
  EXPECT_EQ(
      describe(*change->slow),
      "it takes 42.0 ms a step without waiting, the others 22.0 ms; most of it in forward (30.0 ms, the "
      "others 10.0 ms)");
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(watch.look(told(kSlowForward))) << i;
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(watch.look(told(i % 2 == 0 ? kSlowBackward : kSlowForward))) << "now so and now so";
  }
  for (int i = 1; i < StragglerWatch::kWindowsToChange; ++i) {
    EXPECT_FALSE(watch.look(told(kSlowBackward))) << i;
  }
  change = watch.look(told(kSlowBackward));
  ASSERT_TRUE(change && change->slow);
  EXPECT_EQ(change->slow->phase, TrainingPhase::kBackward);
  for (int i = 1; i < StragglerWatch::kWindowsToChange; ++i) EXPECT_FALSE(watch.look(told(kEven))) << i;
  change = watch.look(told(kEven));
  ASSERT_TRUE(change);
  EXPECT_FALSE(change->slow);
  EXPECT_EQ(change->before, 1);
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(watch.look(told(kEven))) << i;
}

TEST(Straggler, IsSlowInAllPhasesWhereNoneExplainsIt) {
  const auto found = find_straggler(told({{6, 6, 6, 24, 6}, {12, 13, 12, 0, 12}}));
  ASSERT_TRUE(found);
  EXPECT_EQ(
      describe(*found),
      "it takes 49.0 ms a step without waiting, the others 24.0 ms; in all phases, most in forward (13.0 "
      "ms, the others 6.00 ms)");
}

TEST(StragglerWatch, WhatCanNotBeComparedTakesNothingBack) {
  const std::vector<Milliseconds> unlike = {{1, 10, 10, 50, 1}, {1, 10, 10, 0, 1}};
  StragglerWatch watch;
  ASSERT_TRUE(watch.look(told(kSlowForward)));
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(watch.look(told(unlike))) << i;
  for (int i = 1; i < StragglerWatch::kWindowsToChange; ++i) EXPECT_FALSE(watch.look(told(kEven))) << i;
  EXPECT_FALSE(watch.look(told(unlike)));
  const auto change = watch.look(told(kEven));
  EXPECT_TRUE(change && !change->slow);
}

}  // namespace
}  // namespace lockstep::transport::stragglers_test
