#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>

#include <gtest/gtest.h>

#include <lockstep/base/training/step_mark.h>
#include <lockstep/base/training/training_phases.h>

namespace lockstep::training_phases_test {
namespace {

TEST(StepCounter, CountsBatchesWithoutAModel) {
  StepCounter counter;
  const int loader = 0, other = 0;
  EXPECT_TRUE(counter.begins(StepMark::kBatch, &loader));
  EXPECT_FALSE(counter.begins(StepMark::kBatch, &other));
  EXPECT_TRUE(counter.begins(StepMark::kBatch, &loader));
}

TEST(StepCounter, CountsForwardsOnceThereAreAny) {
  StepCounter counter;
  const int loader = 0, model = 0, second = 0;
  EXPECT_TRUE(counter.begins(StepMark::kBatch, &loader));
  EXPECT_FALSE(counter.begins(StepMark::kForward, &model)) << "the same step";
  EXPECT_FALSE(counter.begins(StepMark::kForward, &second)) << "a second model trains in the same step";
  EXPECT_FALSE(counter.begins(StepMark::kBatch, &loader));
  EXPECT_TRUE(counter.begins(StepMark::kForward, &model));
}

TEST(StepCounter, GoesOverToTheNextModel) {
  StepCounter counter;
  const int model = 0, next = 0;
  EXPECT_TRUE(counter.begins(StepMark::kForward, &model));
  for (int i = 0; i < StepCounter::kPatience; ++i) EXPECT_FALSE(counter.begins(StepMark::kForward, &next));
  EXPECT_TRUE(counter.begins(StepMark::kForward, &next));
  EXPECT_TRUE(counter.begins(StepMark::kForward, &next));
  EXPECT_FALSE(counter.begins(StepMark::kForward, &model));
}

constexpr int64_t kMillisecond = 1'000'000;

/// Steps with these milliseconds of each phase; the last window, if one has ended.
std::optional<PhaseTimes> take_steps(PhaseWindow& window, int count, int64_t data, int64_t forward,
                                     int64_t waiting) {
  std::optional<PhaseTimes> last;
  for (int i = 0; i < count; ++i) {
    window.add(TrainingPhase::kData, data * kMillisecond);
    window.add(TrainingPhase::kForward, forward * kMillisecond);
    window.add(TrainingPhase::kWaiting, waiting * kMillisecond);
    if (auto times = window.end_step(/*now_ns=*/i)) last = times;
  }
  return last;
}

TEST(PhaseWindow, GivesMediansOfTwentySteps) {
  PhaseWindow window;
  EXPECT_FALSE(take_steps(window, 9, 10'000, 0, 0)) << "fewer than half do not count";
  EXPECT_FALSE(take_steps(window, 10, 20, 100, 80));
  const auto times = take_steps(window, 1, 20, 100, 80);
  ASSERT_TRUE(times);
  EXPECT_DOUBLE_EQ(times->step, 200e6);
  EXPECT_DOUBLE_EQ(times->own, 120e6);
  EXPECT_DOUBLE_EQ(times->of(TrainingPhase::kData), 20e6);
  EXPECT_DOUBLE_EQ(times->of(TrainingPhase::kForward), 100e6);
  EXPECT_DOUBLE_EQ(times->of(TrainingPhase::kWaiting), 80e6);
  EXPECT_EQ(times->span_ns, (9 * 10'000 + 11 * 200) * kMillisecond);
  EXPECT_FALSE(take_steps(window, 19, 1, 100, 1)) << "the next one is of its own steps alone";
}

TEST(PhaseWindow, TakesShortStepsTogether) {
  PhaseWindow window;
  EXPECT_FALSE(take_steps(window, 199, 1, 8, 1)) << "steps of 10 ms: ten make one of the 20 values";
  const auto times = take_steps(window, 1, 1, 8, 1);
  ASSERT_TRUE(times);
  EXPECT_DOUBLE_EQ(times->step, 10e6);
  EXPECT_DOUBLE_EQ(times->own, 9e6);
  EXPECT_EQ(times->span_ns, 2000 * kMillisecond);
}

TEST(PhaseBoard, GivesWhatWasPut) {
  PhaseBoard board;
  EXPECT_FALSE(board.times());
  PhaseTimes times{.ended_ns = 7, .span_ns = 8, .step = 9, .own = 10};
  times.phases = {1, 2, 3, 4, 5, 6};
  board.set_times(times);
  const auto read = board.times();
  ASSERT_TRUE(read);
  EXPECT_EQ(read->ended_ns, 7);
  EXPECT_EQ(read->span_ns, 8);
  EXPECT_EQ(read->step, 9);
  EXPECT_EQ(read->own, 10);
  EXPECT_EQ(read->phases, times.phases);
}

TEST(PhaseBoard, NeverGivesAMix) {
  PhaseBoard board;
  std::atomic<bool> over{false};
  std::thread writer([&] {
    for (int64_t i = 1; !over; ++i) {
      const auto number = static_cast<double>(i);
      PhaseTimes times{.ended_ns = i, .span_ns = i, .step = number, .own = number};
      times.phases.fill(number);
      board.set_times(times);
    }
  });
  for (int i = 0; i < 20'000; ++i) {
    const auto times = board.times();
    if (!times) continue;
    const auto number = static_cast<double>(times->ended_ns);
    ASSERT_EQ(times->step, number);
    ASSERT_EQ(times->own, number);
    for (const double phase : times->phases) ASSERT_EQ(phase, number);
  }
  over = true;
  writer.join();
}

struct Shown {
  uint64_t steps;
  TrainingPhase phase;
};
Shown shown(const PhaseBoard& board) {
  return {board.newest_step().number, static_cast<TrainingPhase>(board.phase.load())};
}

TEST(TrainingPhases, AreShownAsTheyChangeInTheThreadThatTrains) {
  auto audience = std::make_shared<PhaseAudience>();
  audience->board = std::make_shared<PhaseBoard>();
  const PhaseBoard& board = *audience->board;
  begin_telling_phases(audience);
  EXPECT_EQ(shown(board).phase, TrainingPhase::kNone);
  enter_phase(TrainingPhase::kBackward);
  EXPECT_EQ(shown(board).phase, TrainingPhase::kNone) << "no step has begun";
  const int model = 0;
  mark_step(StepMark::kForward, &model);
  EXPECT_EQ(shown(board).steps, 1);
  EXPECT_EQ(shown(board).phase, TrainingPhase::kForward);
  const int64_t since = board.since_ns;
  EXPECT_GT(since, 0);
  {
    const WaitingPhase waiting;
    EXPECT_EQ(shown(board).phase, TrainingPhase::kWaiting);
    std::thread([] { enter_phase(TrainingPhase::kOptimizer); }).join();
    EXPECT_EQ(shown(board).phase, TrainingPhase::kWaiting) << "another thread's is not told";
  }
  EXPECT_EQ(shown(board).phase, TrainingPhase::kForward) << "as before";
  std::thread([] { enter_phase(TrainingPhase::kBackward, /*from_any_thread=*/true); }).join();
  EXPECT_EQ(shown(board).phase, TrainingPhase::kBackward);
  count_samples(64);
  EXPECT_EQ(board.samples, 64);
  EXPECT_EQ(board.newest_step().samples, 0);
  const int64_t began = board.newest_step().began_ns;
  mark_step(StepMark::kForward, &model);
  EXPECT_EQ(shown(board).steps, 2);
  EXPECT_EQ(board.newest_step().samples, 64) << "the rest belongs to the step that begins";
  EXPECT_GE(board.newest_step().began_ns, began);
  EXPECT_EQ(board.told_step, -1);
  std::thread([] { tell_progress(1002, 0.25); }).join();
  EXPECT_EQ(board.told_step, 1002);
  EXPECT_EQ(board.loss, 0.25);

  auto later = std::make_shared<PhaseAudience>();
  later->board = std::make_shared<PhaseBoard>();
  begin_telling_phases(later);
  EXPECT_EQ(shown(*later->board).steps, 2) << "what was before is told, too";
  EXPECT_EQ(later->board->told_step, 1002);
  EXPECT_EQ(later->board->newest_step().samples, 64);
  end_telling_phases(audience);
  enter_phase(TrainingPhase::kOptimizer);
  EXPECT_EQ(shown(*later->board).phase, TrainingPhase::kOptimizer);
  EXPECT_EQ(shown(board).phase, TrainingPhase::kForward) << "another board has taken its place";
  end_telling_phases(later);
  enter_phase(TrainingPhase::kData);
  EXPECT_EQ(shown(*later->board).phase, TrainingPhase::kOptimizer);
}

TEST(TrainingPhases, ActionsOfAPlanAreShownWhileTheyLast) {
  auto audience = std::make_shared<PhaseAudience>();
  audience->board = std::make_shared<PhaseBoard>();
  begin_telling_phases(audience);
  const auto shown = [](const PhaseAudience& to) { return TellingAction::describe(to.board->action); };
  EXPECT_EQ(shown(*audience), "");
  {
    const TellingAction action(2, 'B', 3);
    EXPECT_EQ(shown(*audience), "2B3");
    auto later = std::make_shared<PhaseAudience>();
    later->board = std::make_shared<PhaseBoard>();
    begin_telling_phases(later);
    EXPECT_EQ(shown(*later), "2B3") << "what has begun before is told, too";
    end_telling_phases(later);
    begin_telling_phases(audience);
  }
  EXPECT_EQ(shown(*audience), "");
  {
    const TellingAction action((1U << 24) - 1, 'W', 4'294'967'295U);
    EXPECT_EQ(shown(*audience), "16777215W4294967295");
  }
  end_telling_phases(audience);
}

}  // namespace
}  // namespace lockstep::training_phases_test
