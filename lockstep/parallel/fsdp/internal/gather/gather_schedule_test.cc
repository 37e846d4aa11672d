#include <algorithm>
#include <cstddef>
#include <gmock/gmock.h>
#include <optional>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/parallel/fsdp/internal/gather/gather_schedule.h>

namespace lockstep::fsdp::internal::gather_schedule_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Steps = GatherSchedule::Steps;

constexpr auto kNone = std::nullopt;

GatherStep start(size_t unit) {
  return {GatherStep::Kind::kStart, unit};
}
GatherStep finish(size_t unit) {
  return {GatherStep::Kind::kFinish, unit};
}
GatherStep free(size_t unit) {
  return {GatherStep::Kind::kFree, unit};
}

Steps use(GatherSchedule& schedule, size_t unit) {
  Steps steps = schedule.use(unit);
  schedule.release(unit);
  return steps;
}

/// What a pass in this order does.
Steps run(GatherSchedule& schedule, GatherPass pass, const std::vector<size_t>& order,
          bool keeps_all = false) {
  Steps all = schedule.begin(pass, keeps_all);
  const auto append = [&](const Steps& steps) { all.insert(all.end(), steps.begin(), steps.end()); };
  for (const size_t unit : order) append(use(schedule, unit));
  append(schedule.end(pass));
  return all;
}

TEST(GatherSchedule, AUnitIsGatheredWhenItIsUsedAndTheOldestIsFreed) {
  GatherSchedule schedule(4, 2, /*forward_prefetch=*/false, kNone);
  EXPECT_THAT(run(schedule, GatherPass::kForward, {0, 0, 1, 2, 2}),
              ElementsAre(start(0), finish(0), start(1), finish(1), free(0), start(2), finish(2)));
  EXPECT_THAT(run(schedule, GatherPass::kBackward, {2, 1, 0}), ElementsAre(free(2), start(0), finish(0)));
  EXPECT_THAT(schedule.free_all(), ElementsAre(free(0), free(1)));
  EXPECT_THAT(schedule.free_all(), IsEmpty());
}

TEST(GatherSchedule, AUnitBetweenOthersStays) {
  GatherSchedule schedule(4, 2, /*forward_prefetch=*/true, kNone);
  run(schedule, GatherPass::kForward, {0, 1, 0, 2, 0, 3});
  schedule.free_all();
  EXPECT_THAT(run(schedule, GatherPass::kForward, {0, 1, 0, 2, 0, 3}),
              ElementsAre(start(0), finish(0), start(1), finish(1), free(1), start(2), finish(2), free(2),
                          start(3), finish(3)));
}

TEST(GatherSchedule, WhatCameNextIsGatheredEarly) {
  GatherSchedule schedule(4, 2, /*forward_prefetch=*/true, BackwardPrefetch::BACKWARD_PRE);
  run(schedule, GatherPass::kForward, {0, 1, 2, 3});
  run(schedule, GatherPass::kBackward, {3, 2, 1, 0});
  schedule.free_all();
  schedule.begin(GatherPass::kForward, false);
  EXPECT_THAT(use(schedule, 0), ElementsAre(start(0), finish(0), start(1)));
  EXPECT_THAT(use(schedule, 1), ElementsAre(finish(1), free(0), start(2)));
  EXPECT_THAT(use(schedule, 2), ElementsAre(finish(2), free(1), start(3)));
  EXPECT_THAT(use(schedule, 3), ElementsAre(finish(3)));
  schedule.end(GatherPass::kForward);
  schedule.begin(GatherPass::kBackward, false);
  EXPECT_THAT(use(schedule, 3), IsEmpty()) << "2 is whole";
  EXPECT_THAT(schedule.gradients_are_complete(3, false), ElementsAre(free(3)));
  EXPECT_THAT(use(schedule, 2), ElementsAre(start(1)));
  // In another order than before nothing is early any more.
  EXPECT_THAT(use(schedule, 0), ElementsAre(finish(1), free(1), start(0), finish(0)));
  EXPECT_THAT(use(schedule, 1), ElementsAre(free(2), start(1), finish(1)));
  schedule.end(GatherPass::kBackward);
  EXPECT_THAT(schedule.free_all(), ElementsAre(free(0), free(1)));
}

TEST(GatherSchedule, BackwardPostGathersTheNextAfterTheGradients) {
  GatherSchedule schedule(3, 2, /*forward_prefetch=*/false, BackwardPrefetch::BACKWARD_POST);
  run(schedule, GatherPass::kBackward, {2, 1, 0});
  schedule.free_all();
  schedule.begin(GatherPass::kBackward, false);
  EXPECT_THAT(use(schedule, 2), ElementsAre(start(2), finish(2)));
  EXPECT_THAT(schedule.gradients_are_complete(2, false), ElementsAre(free(2), start(1)));
  EXPECT_THAT(use(schedule, 1), ElementsAre(finish(1)));
  EXPECT_THAT(schedule.gradients_are_complete(1, false), ElementsAre(free(1), start(0)));
  EXPECT_THAT(schedule.free_all(), ElementsAre(finish(0), free(0)));
}

TEST(GatherSchedule, WhatMayBeUsedAgainStaysAfterItsGradients) {
  GatherSchedule schedule(3, 2, /*forward_prefetch=*/false, BackwardPrefetch::BACKWARD_POST);
  run(schedule, GatherPass::kBackward, {2, 1, 0});
  schedule.free_all();
  schedule.begin(GatherPass::kBackward, false);
  use(schedule, 2);
  EXPECT_THAT(schedule.gradients_are_complete(2, true), ElementsAre(start(1)));
  EXPECT_THAT(use(schedule, 2), IsEmpty());
  EXPECT_THAT(use(schedule, 1), ElementsAre(finish(1)));
  EXPECT_THAT(use(schedule, 0), ElementsAre(free(2), start(0), finish(0)));
}

TEST(GatherSchedule, WhatAnOperatorUsesStays) {
  GatherSchedule schedule(4, 2, /*forward_prefetch=*/false, kNone);
  schedule.begin(GatherPass::kForward, false);
  for (const size_t unit : {0, 1, 2}) EXPECT_THAT(schedule.use(unit), ElementsAre(start(unit), finish(unit)));
  EXPECT_THAT(schedule.free_all(), IsEmpty());
  for (const size_t unit : {0, 1, 2}) schedule.release(unit);
  EXPECT_THAT(use(schedule, 3), ElementsAre(free(0), free(1), start(3), finish(3)));
}

TEST(GatherSchedule, AForwardWithinABackwardHasAnOrderOfItsOwn) {
  GatherSchedule schedule(3, 2, /*forward_prefetch=*/false, BackwardPrefetch::BACKWARD_PRE);
  for (int round = 0; round < 2; ++round) {
    schedule.free_all();
    schedule.begin(GatherPass::kBackward, false);
    const Steps first = use(schedule, 2);
    run(schedule, GatherPass::kForward, {1});
    const Steps second = use(schedule, 1);
    if (round == 0) {
      EXPECT_THAT(first, ElementsAre(start(2), finish(2)));
      EXPECT_THAT(second, IsEmpty());
    } else {
      EXPECT_THAT(first, ElementsAre(start(2), finish(2), start(1)));
      EXPECT_THAT(second, ElementsAre(free(2), start(0)));
    }
    use(schedule, 0);
    schedule.end(GatherPass::kBackward);
  }
}

// They would wait for each other otherwise.
TEST(GatherSchedule, RanksThatLackGradientsGatherTheSameUnits) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    const size_t units = 2 + random() % 5, most = 2 + random() % 2;
    std::optional<BackwardPrefetch> prefetch;
    if (random() % 3 > 0) prefetch = static_cast<BackwardPrefetch>(random() % 2);
    const bool keeps_all = random() % 3 == 0, changes = random() % 3 == 0;
    const GatherSchedule schedule(units, most, random() % 2 == 0, prefetch);
    std::vector<GatherSchedule> ranks(2, schedule);
    std::vector<std::vector<size_t>> started(2);
    const auto on_rank = [&](size_t rank, const auto& action) {
      for (const auto& [kind, unit] : action(ranks[rank])) {
        if (kind == GatherStep::Kind::kStart) started[rank].push_back(unit);
      }
    };
    const auto on_both = [&](const auto& action) { on_rank(0, action), on_rank(1, action); };
    const auto forward = [&](std::vector<size_t> order) {
      std::ranges::reverse(order);
      on_both([&](GatherSchedule& rank) { return run(rank, GatherPass::kForward, order, keeps_all); });
    };
    std::vector<size_t> order;  // of backward
    for (int step = 0; step < 4; ++step) {
      if (step == 0 || changes) {
        order.resize(10);
        for (size_t& unit : order) unit = random() % units;
      }
      forward(order);
      on_both([&](GatherSchedule& rank) { return rank.begin(GatherPass::kBackward, keeps_all); });
      for (auto place = order.begin(); place != order.end(); ++place) {
        if (random() % 4 == 0) {  // an activation checkpoint of what comes next
          forward(
              {place, place + std::min(static_cast<std::ptrdiff_t>(1 + random() % 3), order.end() - place)});
        }
        const size_t unit = *place;
        on_both([&](GatherSchedule& rank) { return use(rank, unit); });
        if (std::find(place + 1, order.end(), unit) != order.end()) continue;
        const auto complete = [&](GatherSchedule& rank) { return rank.gradients_are_complete(unit, false); };
        on_rank(0, complete);
        if (random() % 2 == 0) on_rank(1, complete);
      }
      on_both([&](GatherSchedule& rank) { return rank.end(GatherPass::kBackward); });
      on_both([&](GatherSchedule& rank) { return rank.free_all(); });
    }
    EXPECT_EQ(started[0], started[1]) << "seed " << seed;
  }
}

TEST(GatherSchedule, AnyOrderGivesEachUnitWhenItIsUsedAndNeverMoreThanTheMost) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const size_t units = 1 + random() % 7, most = 2 + random() % 2;
    std::optional<BackwardPrefetch> prefetch;
    if (random() % 3 > 0) prefetch = static_cast<BackwardPrefetch>(random() % 2);
    GatherSchedule schedule(units, most, random() % 2 == 0, prefetch);
    std::vector<UnitPhase> phases(units, UnitPhase::kSharded);
    const auto obey = [&](const Steps& steps) {
      for (const auto& [kind, unit] : steps) {
        const UnitPhase before = phases[unit];
        switch (kind) {
          case GatherStep::Kind::kStart:
            EXPECT_EQ(before, UnitPhase::kSharded) << "seed " << seed;
            phases[unit] = UnitPhase::kGathering;
            break;
          case GatherStep::Kind::kFinish:
            EXPECT_EQ(before, UnitPhase::kGathering) << "seed " << seed;
            phases[unit] = UnitPhase::kWhole;
            break;
          case GatherStep::Kind::kFree:
            EXPECT_EQ(before, UnitPhase::kWhole) << "seed " << seed;
            phases[unit] = UnitPhase::kSharded;
            break;
        }
        EXPECT_LE(units - static_cast<size_t>(std::ranges::count(phases, UnitPhase::kSharded)), most)
            << "seed " << seed;
      }
    };
    for (int pass = 0; pass < 6; ++pass) {
      const auto kind = pass % 2 == 0 ? GatherPass::kForward : GatherPass::kBackward;
      obey(schedule.begin(kind, false));
      for (int i = 0; i < 12; ++i) {
        const auto step = static_cast<size_t>(i / 2 * (pass % 2 + 1));
        const size_t unit = (pass < 4 ? step : random()) % units;
        obey(schedule.use(unit));
        EXPECT_EQ(phases[unit], UnitPhase::kWhole) << "seed " << seed;
        schedule.release(unit);
        if (kind == GatherPass::kBackward && random() % 3 == 0) {
          obey(schedule.gradients_are_complete(unit, unit % 4 == 1));
        }
      }
      obey(schedule.end(kind));
      if (random() % 2 == 0) {
        obey(schedule.free_all());
        EXPECT_EQ(std::ranges::count(phases, UnitPhase::kSharded), static_cast<std::ptrdiff_t>(units));
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::fsdp::internal::gather_schedule_test
