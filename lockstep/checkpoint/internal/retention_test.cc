#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <gmock/gmock.h>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/checkpoint/internal/retention.h>

namespace lockstep::retention_test {
namespace {

using checkpoint::internal::checkpoints_to_remove;
using checkpoint::internal::Condition;
using checkpoint::internal::ManagedCheckpoint;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Mode = CheckpointManagerOptions::Mode;

std::vector<int64_t> steps_of(const std::vector<CheckpointInfo>& infos) {
  std::vector<int64_t> steps;
  for (const auto& info : infos) steps.push_back(info.step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

Condition all_good(const CheckpointInfo&) {
  return Condition::kGood;
}

TEST(Retention, KeepsTheLastTheBestAndEmergencies) {
  const auto one = [](int64_t step, double loss, const std::string& emergency = "") {
    CheckpointInfo info{.step = step, .metrics = {{"loss", loss}}, .emergency = emergency};
    info.directory = std::to_string(step) + emergency;
    return info;
  };
  const std::vector<CheckpointInfo> there = {one(1, 0.5),      one(2, NAN),     one(3, 0.1), one(4, 0.9),
                                             one(5, 0.1),      one(6, NAN),     one(7, 0.8), one(7, 0.7, "e"),
                                             one(8, 0.6, "e"), one(2, 0.6, "e")};
  const auto removed = [&](CheckpointManagerOptions options, std::vector<std::filesystem::path> also = {}) {
    std::vector<ManagedCheckpoint> managed;
    for (const auto& info : there) managed.push_back({info});
    return steps_of(checkpoints_to_remove(managed, options, also, all_good));
  };
  EXPECT_THAT(removed({.keep_last = 1, .keep_best = 0}), ElementsAre(1, 2, 2, 3, 4, 5, 6));
  EXPECT_THAT(removed({.keep_last = 1, .keep_best = 1, .metric = "loss"}), ElementsAre(1, 2, 2, 3, 4, 6));
  EXPECT_THAT(removed({.keep_last = 1, .keep_best = 2, .metric = "loss"}), ElementsAre(1, 2, 2, 4, 6));
  EXPECT_THAT(removed({.keep_last = 1, .keep_best = 1, .metric = "loss", .mode = Mode::max}),
              ElementsAre(1, 2, 2, 3, 5, 6));
  EXPECT_THAT(removed({.keep_last = 1, .keep_best = 9, .metric = "none"}), ElementsAre(1, 2, 2, 3, 4, 5, 6));
  EXPECT_THAT(removed({.keep_last = 1, .keep_best = 100, .metric = "loss"}), ElementsAre(2, 6));
  EXPECT_THAT(removed({.keep_last = 2, .keep_best = 0, .keep_emergency = 1}, {"1", "2"}),
              ElementsAre(2, 3, 4, 5, 7));
  EXPECT_THAT(removed({.keep_last = 100, .keep_best = 0, .keep_emergency = 3}), IsEmpty());
}

ManagedCheckpoint one(int64_t step, int64_t written, double loss = 1) {
  CheckpointInfo info{.step = step, .metrics = {{"loss", loss}}, .directory = std::to_string(step)};
  return {info, written};
}

bool contains(const std::vector<int64_t>& steps, const CheckpointInfo& info) {
  return std::find(steps.begin(), steps.end(), info.step) != steps.end();
}

TEST(Retention, ADamagedOneTakesNoGoodOnesPlace) {
  const auto removed = [&](const std::vector<ManagedCheckpoint>& there, const std::vector<int64_t>& damaged,
                           const CheckpointManagerOptions& options) {
    return steps_of(checkpoints_to_remove(there, options, {}, [&](const CheckpointInfo& info) {
      return contains(damaged, info) ? Condition::kDamaged : Condition::kGood;
    }));
  };
  const CheckpointManagerOptions options{.keep_last = 3, .keep_best = 0};
  // 100 is good and stays until three good ones are newer, and so do the damaged ones.
  const std::vector<int64_t> damaged = {101, 102, 103};
  std::vector<ManagedCheckpoint> there = {one(99, 0), one(100, 0), one(101, 0), one(102, 0), one(103, 0)};
  there.push_back(one(110, 1));
  EXPECT_THAT(removed(there, damaged, options), IsEmpty());
  there.push_back(one(120, 2));
  EXPECT_THAT(removed(there, damaged, options), ElementsAre(99));
  there.push_back(one(130, 3));
  EXPECT_THAT(removed(there, damaged, options), ElementsAre(99, 100, 101, 102, 103));
  // The best, too.
  EXPECT_THAT(removed({one(1, 0, 0.1), one(2, 0, 0.2), one(3, 0, 0.3), one(4, 1)}, {1},
                      {.keep_last = 1, .keep_best = 1, .metric = "loss"}),
              ElementsAre(1, 3));
  // A run that went back removes neither what has higher steps nor what it has written last.
  EXPECT_THAT(
      removed({one(5, 1), one(6, 2), one(7, 3), one(8, 4), one(300, 0), one(200, 0), one(100, 0), one(90, 0)},
              {}, options),
      ElementsAre(5, 90));
}

TEST(Retention, OneThatMayBeGoodIsKeptAndNotCounted) {
  const auto removed = [&](const std::vector<ManagedCheckpoint>& there, const std::vector<int64_t>& unknown,
                           const CheckpointManagerOptions& options) {
    return steps_of(checkpoints_to_remove(there, options, {}, [&](const CheckpointInfo& info) {
      return contains(unknown, info) ? Condition::kUnknown : Condition::kGood;
    }));
  };
  const std::vector<ManagedCheckpoint> there = {one(1, 0, 0.1), one(2, 0, 0.2), one(3, 0, 0.3),
                                                one(4, 0, 0.4), one(5, 1, 0.5)};
  const CheckpointManagerOptions best{.keep_last = 1, .keep_best = 1, .metric = "loss"};
  EXPECT_THAT(removed(there, {}, best), ElementsAre(2, 3, 4));
  EXPECT_THAT(removed(there, {1}, best), ElementsAre(3, 4));
  EXPECT_THAT(removed(there, {1, 2, 3, 4, 5}, best), IsEmpty());
  const CheckpointManagerOptions last{.keep_last = 2, .keep_best = 0};
  EXPECT_THAT(removed(there, {4}, last), ElementsAre(1, 2));
  // After enough good ones its condition does not matter.
  EXPECT_THAT(removed(there, {1}, last), ElementsAre(1, 2, 3));
}

TEST(Retention, EveryKthStepIsKeptForEver) {
  std::mt19937 random(5);
  const auto below = [&](int64_t end) { return std::uniform_int_distribution<int64_t>(0, end - 1)(random); };
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<ManagedCheckpoint> there;
    std::map<int64_t, Condition> conditions;
    const int64_t every = 1 + below(4);
    const int64_t count = below(20);
    for (int64_t i = 0; i < count; ++i) {
      there.push_back(one(i * every, below(2) * (i + 1), static_cast<double>(below(5))));
      if (below(4) == 0) there.back().info.emergency = "a signal";
      conditions[i * every] = trial % 2 == 0 ? Condition::kGood : static_cast<Condition>(below(3));
    }
    CheckpointManagerOptions options{
        .keep_last = 1 + below(4), .keep_best = below(3), .metric = "loss", .keep_emergency = 1 + below(2)};
    const auto removed = [&] {
      return steps_of(checkpoints_to_remove(
          there, options, {}, [&](const CheckpointInfo& info) { return conditions.at(info.step); }));
    };
    const auto without = removed();
    options.keep_period = 1 + below(12);
    std::vector<int64_t> expected;
    for (const int64_t step : without) {
      if (step % options.keep_period != 0) expected.push_back(step);
    }
    const auto with = removed();
    // Where nothing would go if all were good, none is looked at, and a damaged one may stay.
    EXPECT_TRUE(with == expected ||
                (trial % 2 == 1 && std::includes(expected.begin(), expected.end(), with.begin(), with.end())))
        << "keep_period " << options.keep_period << ", trial " << trial;
  }
}

TEST(Retention, TheClockHasNoSay) {
  std::vector<ManagedCheckpoint> there;
  for (int64_t step = 1; step <= 4; ++step) {
    CheckpointInfo info{.step = step, .directory = std::to_string(step)};
    info.saved_at = std::chrono::system_clock::time_point(std::chrono::hours(1000 - step));  // it jumped back
    there.push_back({info, step > 2 ? step : 0});
  }
  EXPECT_THAT(steps_of(checkpoints_to_remove(there, {.keep_last = 2}, {}, all_good)), ElementsAre(1, 2));
}

}  // namespace
}  // namespace lockstep::retention_test
