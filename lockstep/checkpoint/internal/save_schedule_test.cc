#include <chrono>
#include <cstdint>
#include <gmock/gmock.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/checkpoint/internal/save_schedule.h>

namespace lockstep::save_schedule_test {
namespace {

using namespace std::chrono_literals;
using checkpoint::internal::SaveSchedule;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// A schedule whose leader asks a clock of the test's.
class Schedule {
 public:
  explicit Schedule(CheckpointManagerOptions options)
      : options_(std::move(options)), schedule_(options_, true, [this](const SaveSchedule::Look& look) {
          ++looks;
          return look;
        }) {}
  /// Steps of `per_step` each, with saves that hold up for `cost`; those after which it saved.
  std::vector<int64_t> saves(int64_t steps, std::chrono::nanoseconds per_step,
                             std::chrono::nanoseconds cost = 0ns) {
    std::vector<int64_t> at;
    for (int64_t i = 0; i < steps; ++i) {
      now_ += per_step;
      if (!schedule_.due_at_step(++step_, now_)) continue;
      at.push_back(step_);
      now_ += cost;
      schedule_.saved(step_, now_, cost);
      EXPECT_FALSE(schedule_.due_at_step(step_, now_));
    }
    return at;
  }
  SaveSchedule& operator*() { return schedule_; }
  int looks = 0;

 private:
  CheckpointManagerOptions options_;
  SaveSchedule schedule_;
  SaveSchedule::Clock::time_point now_{};
  int64_t step_ = 0;
};

TEST(SaveSchedule, ByStepsAndEpochs) {
  Schedule steps({.every_steps = 10});
  EXPECT_THAT(steps.saves(35, 1s), ElementsAre(10, 20, 30));
  EXPECT_EQ(steps.looks, 0);
  EXPECT_FALSE((*steps).due_at_epoch(1));
  Schedule epochs({.every_epochs = 2});
  EXPECT_THAT(epochs.saves(100, 1s), IsEmpty());
  EXPECT_FALSE((*epochs).due_at_epoch(1));
  EXPECT_TRUE((*epochs).due_at_epoch(2));
  EXPECT_FALSE((*epochs).due_at_epoch(2));
  EXPECT_TRUE((*epochs).due_at_epoch(4));
}

TEST(SaveSchedule, ByTimeWithFewLooks) {
  Schedule timed({.every = 100s});
  const auto at = timed.saves(100'000, 100ms);
  ASSERT_EQ(at.size(), 99U);  // the clock starts with the first step
  for (size_t i = 1; i < at.size(); ++i) EXPECT_NEAR(static_cast<double>(at[i] - at[i - 1]), 1000, 3);
  EXPECT_LT(timed.looks, 2000);
}

TEST(SaveSchedule, ByAShareOfTheTime) {
  Schedule automatic({.automatic = true, .automatic_share = 0.02});
  const auto at = automatic.saves(20'000, 100ms, 1s);
  ASSERT_GE(at.size(), 3U);
  EXPECT_NEAR(static_cast<double>(at[0]), 600, 5);  // after a minute, to learn what it costs
  for (size_t i = 1; i < at.size(); ++i) EXPECT_NEAR(static_cast<double>(at[i] - at[i - 1]), 500, 5);
  EXPECT_EQ((*automatic).interval(), 50s);
  (*automatic).written(60s);
  EXPECT_EQ((*automatic).interval(), 120s);
  Schedule cheap({.every = 1h, .automatic = true});
  cheap.saves(1000, 100ms, 1ms);
  EXPECT_EQ((*cheap).interval(), 10s);
}

}  // namespace
}  // namespace lockstep::save_schedule_test
