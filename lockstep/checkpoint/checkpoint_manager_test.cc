#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <map>
#include <random>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/checkpoint/internal/checksum.h>
#include <lockstep/checkpoint/internal/file_io.h>
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
using checkpoint::internal::Condition;
using checkpoint::internal::SaveSchedule;
using ::testing::AllOf;
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
    std::vector<checkpoint::internal::ManagedCheckpoint> managed;
    for (const auto& info : there) managed.push_back({info});
    return steps_of(checkpoint::internal::checkpoints_to_remove(managed, options, also, all_good));
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

checkpoint::internal::ManagedCheckpoint one(int64_t step, int64_t written, double loss = 1) {
  CheckpointInfo info{.step = step, .metrics = {{"loss", loss}}, .directory = std::to_string(step)};
  return {info, written};
}

bool contains(const std::vector<int64_t>& steps, const CheckpointInfo& info) {
  return std::find(steps.begin(), steps.end(), info.step) != steps.end();
}

TEST(Retention, ADamagedOneTakesNoGoodOnesPlace) {
  const auto removed = [&](const std::vector<checkpoint::internal::ManagedCheckpoint>& there,
                           const std::vector<int64_t>& damaged, const CheckpointManagerOptions& options) {
    return steps_of(
        checkpoint::internal::checkpoints_to_remove(there, options, {}, [&](const CheckpointInfo& info) {
          return contains(damaged, info) ? Condition::kDamaged : Condition::kGood;
        }));
  };
  const CheckpointManagerOptions options{.keep_last = 3, .keep_best = 0};
  // 100 is good and stays until three good ones are newer, and so do the damaged ones.
  const std::vector<int64_t> damaged = {101, 102, 103};
  std::vector<checkpoint::internal::ManagedCheckpoint> there = {one(99, 0), one(100, 0), one(101, 0),
                                                                one(102, 0), one(103, 0)};
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
  const auto removed = [&](const std::vector<checkpoint::internal::ManagedCheckpoint>& there,
                           const std::vector<int64_t>& unknown, const CheckpointManagerOptions& options) {
    return steps_of(
        checkpoint::internal::checkpoints_to_remove(there, options, {}, [&](const CheckpointInfo& info) {
          return contains(unknown, info) ? Condition::kUnknown : Condition::kGood;
        }));
  };
  const std::vector<checkpoint::internal::ManagedCheckpoint> there = {
      one(1, 0, 0.1), one(2, 0, 0.2), one(3, 0, 0.3), one(4, 0, 0.4), one(5, 1, 0.5)};
  const CheckpointManagerOptions best{.keep_last = 1, .keep_best = 1, .metric = "loss"};
  EXPECT_THAT(removed(there, {}, best), ElementsAre(2, 3, 4));
  EXPECT_THAT(removed(there, {1}, best), ElementsAre(3, 4));
  EXPECT_THAT(removed(there, {1, 2, 3, 4, 5}, best), IsEmpty());
  const CheckpointManagerOptions last{.keep_last = 2, .keep_best = 0};
  EXPECT_THAT(removed(there, {4}, last), ElementsAre(1, 2));
  // Behind enough good ones its condition does not matter.
  EXPECT_THAT(removed(there, {1}, last), ElementsAre(1, 2, 3));
}

TEST(Retention, EveryKthStepIsKeptForEver) {
  std::mt19937 random(5);
  const auto below = [&](int64_t end) { return std::uniform_int_distribution<int64_t>(0, end - 1)(random); };
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<checkpoint::internal::ManagedCheckpoint> there;
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
      return steps_of(checkpoint::internal::checkpoints_to_remove(
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
  std::vector<checkpoint::internal::ManagedCheckpoint> there;
  for (int64_t step = 1; step <= 4; ++step) {
    CheckpointInfo info{.step = step, .directory = std::to_string(step)};
    info.saved_at = std::chrono::system_clock::time_point(std::chrono::hours(1000 - step));  // it jumped back
    there.push_back({info, step > 2 ? step : 0});
  }
  EXPECT_THAT(steps_of(checkpoint::internal::checkpoints_to_remove(there, {.keep_last = 2}, {}, all_good)),
              ElementsAre(1, 2));
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
  EXPECT_THAT(refused({.directory = "x", .keep_period = -1}), HasSubstr("keep_period"));
  EXPECT_THAT(refused({.directory = "x", .every_steps = -1}), HasSubstr("every_steps"));
  EXPECT_THAT(refused({.directory = "x", .every = -1s}), HasSubstr("every"));
  EXPECT_THAT(refused({.directory = "x", .automatic = true, .automatic_share = 0}),
              HasSubstr("automatic_share"));
  EXPECT_THAT(refused({.directory = "x", .must_resume = true, .from_scratch_if_all_damaged = true}),
              HasSubstr("contradict"));
  EXPECT_THAT(refused({.directory = "x", .automatic = true, .automatic_share = NAN}),
              HasSubstr("automatic_share"));
}

TEST(CheckpointManager, SavesAndKeepsAndRestores) {
  for (const bool async : {true, false}) {
    const Scratch scratch;
    save_checkpoint(scratch.path() / "step-00000000", training_state(0), {}, {});  // another program's
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
  const checkpoint::internal::MemberRanks ranks;
  checkpoint::internal::SaveJob job(scratch.path() / "a",
                                    {{"model", to_object(StateDict{{"weight", weight}})}}, {}, {}, {},
                                    /*managed=*/true, ranks);
  checkpoint::internal::Pages memory;
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

TEST(CheckpointManager, RetentionChecksWhatAnEarlierRunHasLeft) {
  const Scratch scratch;
  const auto save = [&](std::vector<int64_t> steps) {
    CheckpointManager manager({.directory = scratch.path(), .keep_last = 3, .async = false});
    Training training;
    for (const int64_t step : steps) manager.save(training, {.step = step});
  };
  save({99, 100, 101});
  for (const char* name : {"step-00000101", "step-00000102"}) {
    if (!std::filesystem::exists(scratch.path() / name)) save({102});
    std::ofstream(scratch.path() / name / "model.safetensors", std::ios::in) << "damage";
  }
  EXPECT_EQ(find_latest_checkpoint(scratch.path())->step, 100);
  save({110});
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000099", "step-00000100", "step-00000101",
                                             "step-00000102", "step-00000110"))
      << "three good ones";
  save({120});
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000100", "step-00000101", "step-00000102",
                                             "step-00000110", "step-00000120"));
}

TEST(CheckpointManager, EveryKthStepStaysAsLongAsItIsAskedFor) {
  const Scratch scratch;
  const auto save = [&](std::vector<int64_t> steps, int64_t keep_period) {
    CheckpointManager manager(
        {.directory = scratch.path(), .keep_last = 1, .keep_period = keep_period, .async = false});
    Training training;
    for (const int64_t step : steps) manager.save(training, {.step = step});
  };
  save({1, 2, 3, 4, 5}, 2);
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000002", "step-00000004", "step-00000005"));
  std::ofstream(scratch.path() / "step-00000002" / "model.safetensors", std::ios::in) << "damage";
  save({6, 7}, 2);
  EXPECT_THAT(scratch.entries(),
              ElementsAre("step-00000002", "step-00000004", "step-00000006", "step-00000007"));
  save({8}, 0);
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000008"));
}

/// An earlier run's checkpoints of steps 1 to 3, the first of which is the best.
void save_three(const std::filesystem::path& folder) {
  CheckpointManager manager({.directory = folder, .metric = "loss", .async = false, .fsync = false});
  Training training;
  for (const int64_t step : {1, 2, 3}) {
    manager.save(training, {.step = step, .metrics = {{"loss", 0.1 * static_cast<double>(step)}}});
  }
}

/// One more, and what is left then by keep_last = 1 and keep_best = 1.
std::vector<std::string> left_by_the_fourth(const Scratch& scratch) {
  CheckpointManager manager(
      {.directory = scratch.path(), .keep_last = 1, .metric = "loss", .async = false, .fsync = false});
  Training training;
  manager.save(training, {.step = 4, .metrics = {{"loss", 0.4}}});
  return scratch.entries();
}

TEST(CheckpointManager, RetentionKeepsABestOneThatCannotBeRead) {
  const Scratch scratch;
  save_three(scratch.path());
  // Opening a socket fails with ENXIO, root's too.
  const auto unreadable = scratch.path() / "step-00000001" / "model.safetensors";
  std::filesystem::remove(unreadable);
  ASSERT_EQ(::mknod(unreadable.c_str(), S_IFSOCK | 0600, 0), 0);
  EXPECT_THAT(left_by_the_fourth(scratch), ElementsAre("step-00000001", "step-00000002", "step-00000004"));
}

TEST(CheckpointManager, RetentionTriesAReadThatFailsOnceAgain) {
  for (int pass = 1; pass < 40; pass += 3) {  // in the listing, in the new one, in the best
    const Scratch scratch;
    save_three(scratch.path());
    failpoint::configure("checkpoint.open=errno(5)@" + std::to_string(pass));
    EXPECT_THAT(left_by_the_fourth(scratch), ElementsAre("step-00000001", "step-00000004")) << pass;
    failpoint::configure("");
  }
}

TEST(CheckpointManager, AnEmergencyRemovesNothing) {
  const Scratch scratch;
  CheckpointManager manager(
      {.directory = scratch.path(), .keep_last = 1, .keep_emergency = 1, .async = false});
  Training training;
  manager.save(training, {.step = 1});
  manager.save(training, {.step = 2, .emergency = "a signal"});
  manager.save(training, {.step = 3, .emergency = "another"});
  EXPECT_THAT(scratch.entries(),
              ElementsAre("step-00000001", "step-00000002-emergency", "step-00000003-emergency"));
  manager.save(training, {.step = 4});
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000003-emergency", "step-00000004"));
}

/// The folder's checkpoints of steps 1 and 2, the second of which is to be tried first.
void save_two(const std::filesystem::path& folder) {
  CheckpointManager manager({.directory = folder, .async = false});
  Training training;
  for (const int64_t step : {1, 2}) manager.save(training, {.step = step});
}

TEST(CheckpointManager, WhatWasReadInPartIsNotTakenForGood) {
  const Scratch scratch;
  save_two(scratch.path());
  std::ofstream(scratch.path() / "step-00000002" / "model.safetensors", std::ios::in) << "damage";
  CheckpointManager manager({.directory = scratch.path(), .keep_last = 2, .async = false});
  EXPECT_EQ(manager.load_latest({.parts = {"scheduler"}})->info.step, 2);
  Training training;
  manager.save(training, {.step = 3});
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000001", "step-00000002", "step-00000003"));
}

TEST(CheckpointManager, AReadThatFailsOnceIsTriedAgain) {
  const Scratch scratch;
  save_two(scratch.path());
  CheckpointManager manager({.directory = scratch.path()});
  Training training;
  // EIO, ESTALE; in the listing, in a manifest, in a tensor file.
  for (const char* place : {"look=errno(5)@2", "look=errno(116)@4", "open=errno(116)@1", "open=errno(5)@4",
                            "read=errno(5)@2", "read=errno(116)@6"}) {
    failpoint::configure(std::string("checkpoint.") + place);
    EXPECT_EQ(manager.restore(training)->step, 2) << place;
    failpoint::configure(std::string("checkpoint.") + place);
    EXPECT_EQ(find_latest_checkpoint(scratch.path())->step, 2) << place;
  }
  failpoint::configure("");
}

TEST(CheckpointManager, AReadThatFailsForEverIsAnErrorAndNoDamage) {
  const Scratch scratch;
  save_two(scratch.path());
  Training training;
  CheckpointManager manager(
      {.directory = scratch.path(), .from_scratch_if_all_damaged = true, .async = false});
  for (const auto& [place, reason] : {std::pair{"look=errno(13)", "Permission denied"},
                                      {"open=errno(116)", "Stale file handle"},
                                      {"read=errno(5)", "Input/output error"}}) {
    failpoint::configure(std::string("checkpoint.") + place);
    EXPECT_THAT(message_of<CheckpointIoError>([&] { manager.restore(training); }), HasSubstr(reason));
  }
  EXPECT_THAT(message_of<CheckpointIoError>([&] { find_latest_checkpoint(scratch.path()); }),
              HasSubstr("Input/output error"));
  failpoint::configure("");
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000001", "step-00000002"));
}

TEST(CheckpointManager, ARankThatCannotReadFailsAll) {
  const Scratch scratch;
  if (!Scratch::in_rank()) save_two(scratch.path());
  run_ranks(2,
            [&](int rank) {
              const auto group = init_process_group();
              CheckpointManager manager({.directory = scratch.path(), .async = false});
              Training training;
              if (rank == 1) failpoint::configure("checkpoint.read=errno(5)");
              EXPECT_THAT(message_of<CheckpointIoError>([&] { manager.restore(training); }),
                          ::testing::AllOf(HasSubstr("rank 1: cannot read"), HasSubstr("step-00000002"),
                                           HasSubstr("Input/output error")));
              failpoint::configure("");
              EXPECT_EQ(manager.restore(training)->step, 2);
            },
            {.environment = scratch.environment()});
}

TEST(CheckpointManager, TrainsFromScratchBesideDamagedOnesOnlyWhenAsked) {
  const Scratch scratch;
  save_two(scratch.path());
  std::ofstream(scratch.path() / "step-00000001" / "model.safetensors", std::ios::in) << "damage";
  std::filesystem::remove(scratch.path() / "step-00000002" / "manifest.json");
  Training training;
  {
    CheckpointManager manager({.directory = scratch.path()});
    const auto text = message_of<CheckpointError>([&] { manager.restore(training); });
    for (const char* part : {"all checkpoints in", "step-00000001/model.safetensors", "step-00000002",
                             "there is no manifest.json", "from_scratch_if_all_damaged"}) {
      EXPECT_THAT(text, HasSubstr(part));
    }
  }
  EXPECT_THAT(message_of<CheckpointError>([&] { find_latest_checkpoint(scratch.path()); }),
              HasSubstr("none_if_all_damaged"));
  EXPECT_FALSE(find_latest_checkpoint(scratch.path(), {.none_if_all_damaged = true}));
  CheckpointManager manager({.directory = scratch.path(), .from_scratch_if_all_damaged = true});
  EXPECT_FALSE(manager.restore(training));
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

TEST(CheckpointManager, WhereItMustResumeItSaysWhatIsThereInstead) {
  const Scratch scratch;
  const auto folder = scratch.path() / "run";
  Training training;
  const auto refused = [&] {
    return message_of<CheckpointError>([&] {
      CheckpointManager manager({.directory = folder, .must_resume = true});
      manager.restore(training);
    });
  };
  EXPECT_THAT(refused(), AllOf(HasSubstr("there is no folder " + folder.string()), HasSubstr("must_resume")));
  EXPECT_FALSE(std::filesystem::exists(folder));

  std::filesystem::create_directory(folder);
  EXPECT_THAT(refused(), AllOf(HasSubstr("no checkpoint to go on from in " + folder.string()),
                               HasSubstr("it is empty")));

  std::filesystem::create_directories(folder / ".step-00000001.lockstep-tmp-0123");
  write(folder / "half" / "state.json", "{}");
  write(folder / "notes.txt", "");
  EXPECT_THAT(refused(),
              AllOf(HasSubstr("is one: .step-00000001.lockstep-tmp-0123 (a save that did not finish); half; "
                              "notes.txt. Passed over: "),
                    HasSubstr("half: it is incomplete: there is no manifest.json. Name the folder")));
  for (int i = 0; i < 20; ++i) write(folder / ("other" + std::to_string(i)), "");
  EXPECT_THAT(refused(), HasSubstr("; and 13 more"));

  save_two(folder);
  CheckpointManager manager({.directory = folder, .must_resume = true});
  EXPECT_EQ(manager.restore(training)->step, 2);
  for (const char* name : {"step-00000001", "step-00000002"}) {
    std::filesystem::remove(folder / name / "model.safetensors");
  }
  EXPECT_THAT(refused(), AllOf(HasSubstr("all checkpoints in"), HasSubstr("step-00000001/model.safetensors"),
                               HasSubstr("step-00000002/model.safetensors"),
                               ::testing::Not(HasSubstr("begin at step 0"))));
}

TEST(CheckpointManager, AllRanksLearnThatThereIsNothingToResume) {
  const Scratch scratch;
  run_ranks(2,
            [&](int) {
              const auto group = init_process_group();
              EXPECT_THAT(
                  message_of<CheckpointError>([&] {
                    CheckpointManager manager({.directory = scratch.path() / "missing", .must_resume = true});
                  }),
                  HasSubstr("rank 0: there is no folder"));
              CheckpointManager manager({.directory = scratch.path(), .must_resume = true});
              Training training;
              EXPECT_THAT(message_of<CheckpointError>([&] { manager.restore(training); }),
                          HasSubstr("rank 0: there is no checkpoint to go on from"));
            },
            {.environment = scratch.environment()});
}

TEST(CheckpointManager, DirectoriesOfOthersAreNoCheckpoints) {
  const Scratch scratch;
  write(scratch.path() / "data" / "manifest.json", R"({"format": "something else", "files": []})");
  write(scratch.path() / "page" / "state.json", "{}");
  // Two that can't be looked into: opening a socket fails with ENXIO, root's too.
  std::filesystem::create_directory(scratch.path() / "service");
  ASSERT_EQ(::mknod((scratch.path() / "service" / "manifest.json").c_str(), S_IFSOCK | 0600, 0), 0);
  std::filesystem::create_directory(scratch.path() / "private");
  ASSERT_EQ(::chmod((scratch.path() / "private").c_str(), 0), 0);
  {
    CheckpointManager manager({.directory = scratch.path(), .keep_last = 1, .async = false});
    Training training;
    EXPECT_FALSE(manager.restore(training)) << "from scratch";
    for (const int64_t step : {1, 2}) manager.save(training, {.step = step});
    EXPECT_THAT(scratch.entries(), ElementsAre("data", "page", "private", "service", "step-00000002"));
    EXPECT_EQ(manager.restore(training)->step, 2);
  }
  ASSERT_EQ(::chmod((scratch.path() / "private").c_str(), 0700), 0);
}

TEST(CheckpointManager, AManifestThatNamesOurFormatIsACheckpoints) {
  const Scratch scratch;
  const auto path = scratch.path() / "best" / "manifest.json";
  save_checkpoint(scratch.path() / "best", training_state(1), {}, {.step = 1});
  const std::string text = checkpoint::internal::read_file(path, 1 << 20);
  write(path, text.substr(0, text.size() / 2));
  EXPECT_THAT(message_of<CheckpointError>([&] { find_latest_checkpoint(scratch.path()); }),
              ::testing::AllOf(HasSubstr("all checkpoints in"), HasSubstr("best/manifest.json is damaged")));
  // A later format, as far as it is known by now.
  std::string body = text.substr(0, text.find(",\n\"checksum\""));
  const std::string version = "\"version\": 1";
  body.replace(body.find(version), version.size(), "\"version\": 2");
  write(path, body + ",\n\"checksum\": \"" + checkpoint::internal::checksum_of(body) + "\"\n}\n");
  EXPECT_THAT(message_of<CheckpointError>([&] { find_latest_checkpoint(scratch.path()); }),
              HasSubstr("best/manifest.json was written by a newer version of Lockstep: its format is 2"));
}

TEST(CheckpointManager, TheLatestIsFoundBesideAJobThatRemovesOldOnes) {
  const Scratch scratch;
  std::atomic<bool> done = false;
  std::thread job([&] {
    CheckpointManager manager({.directory = scratch.path(), .keep_last = 1, .async = false, .fsync = false});
    Training training;
    for (int64_t step = 1; step <= 200; ++step) manager.save(training, {.step = step});
    done = true;
  });
  // With one checkpoint at a time most listings are out of date when they are read.
  while (!done) EXPECT_NO_THROW(find_latest_checkpoint(scratch.path()));
  job.join();
  EXPECT_EQ(find_latest_checkpoint(scratch.path())->step, 200);
}

TEST(CheckpointManager, OneRankSaysThatItTrainsFromScratch) {
  const Scratch scratch;
  if (!Scratch::in_rank()) {
    save_two(scratch.path());
    for (const char* name : {"step-00000001", "step-00000002"}) {
      std::filesystem::remove(scratch.path() / name / "model.safetensors");
    }
  }
  const auto outcomes = run_ranks_collect(
      2,
      [&](int) {
        const auto group = init_process_group();
        CheckpointManager manager(
            {.directory = scratch.path(), .from_scratch_if_all_damaged = true, .async = false});
        Training training;
        EXPECT_FALSE(manager.restore(training));
      },
      {.environment = scratch.environment()});
  if (Scratch::in_rank()) return;
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.exit_status.value_or(-1), 0) << outcome.output;
    const auto said = HasSubstr("training from scratch");
    if (outcome.rank == 0) {
      EXPECT_THAT(outcome.output, said);
    } else {
      EXPECT_THAT(outcome.output, ::testing::Not(said));
    }
  }
}

TEST(CheckpointManager, OfOneStepTheMoreCompleteIsRestored) {
  const Scratch scratch;
  run_ranks(2,
            [&](int rank) {
              const auto group = init_process_group();
              CheckpointManager manager({.directory = scratch.path(), .async = false});
              Training training;
              training.own = {{"rank", rank}};
              manager.save(training, {.step = 1});
              if (rank == 1) {
                EXPECT_FALSE(manager.save_alone(training, {.step = 1, .emergency = "rank 0 is gone"}))
                    << "there is a complete one";
                // By one that does not know of it: saved later, and it lacks rank 0's own state.
                save_checkpoint(scratch.path() / "step-00000001-emergency", training.state, training.own,
                                {.step = 1, .emergency = "rank 0 is gone"}, {.alone = true});
              }
              barrier();
              const auto info = manager.restore(training);
              EXPECT_EQ(info->emergency, "");
              EXPECT_EQ(training.own.at("rank").toInt(), rank);
            },
            {.environment = scratch.environment()});
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000001", "step-00000001-emergency"));
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
