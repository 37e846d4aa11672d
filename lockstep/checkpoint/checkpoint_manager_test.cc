#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <gmock/gmock.h>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/checkpoint/internal/member_ranks.h>
#include <lockstep/checkpoint/internal/pages.h>
#include <lockstep/checkpoint/internal/retention.h>
#include <lockstep/checkpoint/internal/save_job.h>
#include <lockstep/checkpoint/internal/save_schedule.h>
#include <lockstep/checkpoint/testing/scratch.h>
#include <lockstep/checkpoint/testing/states.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::checkpoint_manager_test {
namespace {

using namespace std::chrono_literals;
using internal::SaveSchedule;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Mode = CheckpointManagerOptions::Mode;
using testing::message_of;
using testing::run_ranks;
using testing::run_ranks_collect;
using testing::same;
using testing::Scratch;
using testing::training_state;

std::vector<int64_t> steps_of(const std::vector<CheckpointInfo>& infos) {
  std::vector<int64_t> steps;
  for (const auto& info : infos) steps.push_back(info.step);
  std::sort(steps.begin(), steps.end());
  return steps;
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
    return steps_of(internal::checkpoints_to_remove(there, options, also));
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

/// What save() and restore() take.
struct Training {
  StateDict state = training_state(1);
  StateDict own;
  StateDict state_dict() const { return state; }
  StateDict rank_state_dict() const { return own; }
  void load_state_dict(const StateDict& from) { state = from; }
  void load_rank_state_dict(const StateDict& from) { own = from; }
};

TEST(CheckpointManager, RefusesOptionsThatMakeNoSense) {
  const auto refused = [](const CheckpointManagerOptions& options) {
    return message_of<c10::ValueError>([&] { CheckpointManager manager(options); });
  };
  EXPECT_THAT(refused({}), HasSubstr("no directory"));
  EXPECT_THAT(refused({.directory = "x", .keep_last = 0}), HasSubstr("keep_last is 0"));
  EXPECT_THAT(refused({.directory = "x", .keep_best = -1}), HasSubstr("keep_best"));
  EXPECT_THAT(refused({.directory = "x", .keep_emergency = 0}), HasSubstr("keep_emergency"));
  EXPECT_THAT(refused({.directory = "x", .every_steps = -1}), HasSubstr("every_steps"));
  EXPECT_THAT(refused({.directory = "x", .every = -1s}), HasSubstr("every"));
  EXPECT_THAT(refused({.directory = "x", .automatic = true, .automatic_share = 0}),
              HasSubstr("automatic_share"));
  EXPECT_THAT(refused({.directory = "x", .automatic = true, .automatic_share = NAN}),
              HasSubstr("automatic_share"));
}

TEST(CheckpointManager, SavesAndKeepsAndRestores) {
  for (const bool async : {true, false}) {
    const Scratch scratch;
    save_checkpoint(scratch.path() / "step-00000000", training_state(0), {}, {});  // somebody else's
    std::filesystem::create_directory(scratch.path() / "notes");
    CheckpointManager manager(
        {.directory = scratch.path(), .keep_last = 2, .metric = "loss", .async = async});
    Training training;
    EXPECT_FALSE(manager.last_saved());
    const std::vector<double> losses = {NAN, 0.3, 0.5, 0.4, NAN, 0.6};
    for (int64_t step = 1; step <= 6; ++step) {
      training.state = training_state(static_cast<double>(step));
      training.own = {{"step", step}};
      manager.save(training, {.step = step, .metrics = {{"loss", losses[static_cast<size_t>(step - 1)]}}});
      if (step == 4) manager.save(training, {.step = step, .emergency = "a signal"});
      // What is changed behind save() is not in it.
      training.state["model"].toGenericDict().at("fc1.weight").toTensor().fill_(NAN);
    }
    manager.wait();
    EXPECT_THAT(scratch.entries(), ElementsAre("notes", "step-00000000", "step-00000002",
                                               "step-00000004-emergency", "step-00000005", "step-00000006"));
    EXPECT_EQ(manager.last_saved()->step, 6);
    for (const auto& info : list_checkpoints(scratch.path()))
      EXPECT_TRUE(verify_checkpoint(info.directory).empty());
    Training fresh;
    CheckpointManager again({.directory = scratch.path(), .keep_last = 2, .metric = "loss", .async = async});
    EXPECT_EQ(again.restore(fresh)->step, 6);
    EXPECT_TRUE(same(fresh.state, training_state(6)));
    EXPECT_EQ(fresh.own.at("step").toInt(), 6);
    // It knows those of the run before, and may save a step again.
    again.save(fresh, {.step = 6, .metrics = {{"loss", 0.1}}});
    again.save(fresh, {.step = 7});
    again.wait();
    EXPECT_THAT(scratch.entries(), ElementsAre("notes", "step-00000000", "step-00000004-emergency",
                                               "step-00000006", "step-00000007"));
  }
}

TEST(CheckpointManager, CopiesWhileTheProgramGoesOn) {
  const Scratch scratch;
  Training training;
  CheckpointManager manager({.directory = scratch.path(), .copy_later = true});
  const auto weight = torch::full({1 << 20}, 1.0F);
  const auto buffer = torch::full({4}, 1.0F);
  training.state["model"] = to_object(StateDict{{"weight", weight}, {"buffer", buffer}});
  for (int64_t step = 1; step <= 5; ++step) {
    manager.save(training, {.step = step});
    buffer.add_(1);  // as the forward of BatchNorm does
    manager.finish_copy();
    weight.add_(1);
    manager.wait();
    const auto saved =
        from_object<StateDict>(load_checkpoint(manager.last_saved()->directory).state.at("model"));
    EXPECT_TRUE(
        torch::equal(saved.at("weight").toTensor(), torch::full({1 << 20}, static_cast<float>(step))));
    EXPECT_TRUE(torch::equal(saved.at("buffer").toTensor(), torch::full({4}, static_cast<float>(step))));
  }
}

TEST(CheckpointManager, ATensorThatIsChangedBeforeItIsCopiedFailsTheCheckpoint) {
  const Scratch scratch;
  const auto weight = torch::ones({1 << 20});
  const internal::MemberRanks ranks;
  internal::SaveJob job(scratch.path() / "a", {{"model", to_object(StateDict{{"weight", weight}})}}, {}, {},
                        {},
                        /*managed=*/true, ranks);
  internal::Pages memory;
  job.stage(memory, ranks, /*later=*/true);
  weight.add_(1);
  job.copy_rest(ranks);
  EXPECT_THAT(message_of<c10::ValueError>([&] { job.write(ranks); }),
              HasSubstr("'weight' of model was changed"));
  EXPECT_THAT(scratch.entries(), IsEmpty());
}

TEST(CheckpointManager, AnErrorOfTheThreadSurfacesLater) {
  const Scratch scratch;
  Training training;
  CheckpointManager manager({.directory = scratch.path()});
  manager.save(training, {.step = 1});
  manager.wait();
  failpoint::configure("checkpoint.before_sync=error(the disk is gone)");
  manager.save(training, {.step = 2});
  EXPECT_THAT(message_of<CheckpointError>([&] { manager.wait(); }), HasSubstr("the disk is gone"));
  manager.wait();
  manager.save(training, {.step = 3});
  EXPECT_THAT(message_of<CheckpointError>([&] { manager.save(training, {.step = 4}); }),
              HasSubstr("the disk is gone"));
  failpoint::configure("");
  manager.save(training, {.step = 5});
  manager.wait();
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000001", "step-00000005"));
}

TEST(CheckpointManager, RanksSaveBesideTheirCollectives) {
  const Scratch scratch;
  run_ranks(3,
            [&](int rank) {
              const auto group = init_process_group();
              for (const bool sharded : {false, true}) {
                CheckpointManager manager({.directory = scratch.path() / (sharded ? "sharded" : "whole"),
                                           .every_steps = 5,
                                           .every = 1ms,
                                           .keep_last = 2,
                                           .sharded = sharded,
                                           .fsync = false});
                Training training;
                int64_t saves = 0;
                for (int64_t step = 1; step <= 30; ++step) {
                  const auto sum = torch::ones({4});
                  all_reduce(sum);
                  const bool due = manager.should_save(step);
                  const auto all = torch::tensor(static_cast<int64_t>(due));
                  all_reduce(all);
                  ASSERT_EQ(all.item<int64_t>(), due ? 3 : 0);
                  if (!due) continue;
                  training.state = training_state(static_cast<double>(step));
                  training.own = {{"rank", rank}, {"step", step}};
                  manager.save(training, {.step = step});
                  ++saves;
                }
                EXPECT_GE(saves, 6);
                manager.wait();
                Training fresh;
                CheckpointManager again({.directory = manager.options().directory, .async = false});
                EXPECT_EQ(again.restore(fresh)->step, 30);
                EXPECT_TRUE(same(fresh.state, training_state(30)));
                EXPECT_EQ(fresh.own.at("rank").toInt(), rank);
              }
            },
            {.environment = scratch.environment()});
  EXPECT_EQ(scratch.entries_of(scratch.path() / "sharded").size(), 2U);
}

TEST(CheckpointManager, RanksRestoreTheSameThoughOnlyOneSeesDamage) {
  const Scratch scratch;
  run_ranks(2,
            [&](int rank) {
              const auto group = init_process_group();
              CheckpointManager manager({.directory = scratch.path(), .async = false});
              Training training;
              EXPECT_FALSE(manager.restore(training));
              for (const int64_t step : {1, 2}) {
                training.own = {{"rng", torch::full({3}, rank)}};
                manager.save(training, {.step = step});
              }
              barrier();
              if (rank == 1)
                std::filesystem::remove(scratch.path() / "step-00000002" / "rank00001.safetensors");
              barrier();
              EXPECT_EQ(manager.restore(training)->step, 1);
              // By itself, for the one that is left.
              if (rank == 1) manager.save_alone(training, {.step = 3, .emergency = "rank 0 is gone"});
              barrier();
              EXPECT_EQ(manager.restore(training)->step, 3);
              EXPECT_EQ(training.own.empty(), rank == 0);
            },
            {.environment = scratch.environment()});
}

TEST(CheckpointManager, TheProcessEndsCleanlyWhileItWrites) {
  const Scratch scratch;
  for (const std::string way : {"exit", "interrupt", "return", "throw"}) {
    const auto outcomes =
        run_ranks_collect(1,
                          [&](int) {
                            failpoint::configure("checkpoint.within_file=delay(20)");
                            CheckpointManager manager({.directory = scratch.path() / way});
                            Training training;
                            // Of several chunks, so that it is in the middle of a file.
                            training.state["model"] = to_object(StateDict{{"w", torch::ones({1 << 20})}});
                            manager.save(training, {.step = 1});
                            if (way == "exit") std::exit(7);
                            if (way == "interrupt") std::raise(SIGINT);
                            if (way == "throw") throw std::runtime_error("something else");
                          },
                          {.environment = scratch.environment()});
    if (Scratch::in_rank()) continue;
    const auto& outcome = outcomes[0];
    if (way == "exit") {
      EXPECT_EQ(outcome.exit_status, 7) << outcome.output;
    } else if (way == "interrupt") {
      EXPECT_EQ(outcome.signal, SIGINT) << outcome.output;
    } else {
      EXPECT_EQ(outcome.exit_status, way == "return" ? 0 : 1) << outcome.output;
    }
    const auto found = find_latest_checkpoint(scratch.path() / way);
    // A machine that is busy enough may let it finish in the other cases, too; half of it is never there.
    if (way == "return" || way == "throw") {
      EXPECT_TRUE(found) << way;
    }
    if (!found) {
      EXPECT_THAT(list_checkpoints(scratch.path() / way), IsEmpty()) << way;
    }
  }
}

}  // namespace
}  // namespace lockstep::checkpoint_manager_test
