#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <string>
#include <sys/stat.h>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/checkpoint/internal/member_ranks.h>
#include <lockstep/checkpoint/internal/pages.h>
#include <lockstep/checkpoint/internal/save_job.h>
#include <lockstep/checkpoint/testing/scratch.h>
#include <lockstep/checkpoint/testing/states.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::checkpoint_manager_test {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using testing::run_ranks;
using testing::run_ranks_collect;
using testing::same;
using testing::Scratch;
using testing::StateHolder;
using testing::training_state;

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
    StateHolder training;
    EXPECT_FALSE(manager.last_saved());
    const std::vector<double> losses = {NAN, 0.3, 0.5, 0.4, NAN, 0.6};
    for (int64_t step = 1; step <= 6; ++step) {
      training.state = training_state(static_cast<double>(step));
      training.own = {{"step", step}};
      manager.save(training, {.step = step, .metrics = {{"loss", losses[static_cast<size_t>(step - 1)]}}});
      if (step == 4) manager.save(training, {.step = step, .emergency = "a signal"});
      // What is changed after save() is not in it.
      training.state["model"].toGenericDict().at("fc1.weight").toTensor().fill_(NAN);
    }
    manager.wait();
    EXPECT_THAT(scratch.entries(), ElementsAre("notes", "step-00000000", "step-00000002",
                                               "step-00000004-emergency", "step-00000005", "step-00000006"));
    EXPECT_EQ(manager.last_saved()->step, 6);
    for (const auto& info : list_checkpoints(scratch.path()))
      EXPECT_TRUE(verify_checkpoint(info.directory).empty());
    StateHolder fresh;
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
  StateHolder training;
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

TEST(CheckpointManager, AStepOfSgdBeforeTheCopyFailsTheCheckpoint) {
  const Scratch scratch;
  const auto weight = torch::ones({1 << 20}).requires_grad_();
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(0.1));
  weight.mutable_grad() = torch::ones_like(weight);
  const checkpoint::internal::MemberRanks ranks;
  checkpoint::internal::SaveJob job(scratch.path() / "a",
                                    {{"model", to_object(StateDict{{"weight", weight}})}}, {}, {}, {},
                                    /*managed=*/true, ranks);
  checkpoint::internal::Pages memory;
  job.stage(memory, ranks, /*later=*/true);
  sgd.step();  // writes through data(), which has a version of its own
  job.copy_rest(ranks);
  EXPECT_THAT(message_of<c10::ValueError>([&] { job.write(ranks); }),
              HasSubstr("'weight' of model was changed"));
}

TEST(CheckpointManager, AnErrorOfTheThreadSurfacesLater) {
  const Scratch scratch;
  StateHolder training;
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
                StateHolder training;
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
                StateHolder fresh;
                CheckpointManager again({.directory = manager.options().directory, .async = false});
                EXPECT_EQ(again.restore(fresh)->step, 30);
                EXPECT_TRUE(same(fresh.state, training_state(30)));
                EXPECT_EQ(fresh.own.at("rank").toInt(), rank);
              }
            },
            {.environment = scratch.environment()});
  EXPECT_EQ(scratch.entries_of(scratch.path() / "sharded").size(), 2U);
}

TEST(CheckpointManager, RetentionChecksWhatAnEarlierRunHasLeft) {
  const Scratch scratch;
  const auto save = [&](std::vector<int64_t> steps) {
    CheckpointManager manager({.directory = scratch.path(), .keep_last = 3, .async = false});
    StateHolder training;
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
    StateHolder training;
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
  StateHolder training;
  for (const int64_t step : {1, 2, 3}) {
    manager.save(training, {.step = step, .metrics = {{"loss", 0.1 * static_cast<double>(step)}}});
  }
}

/// One more, and what is left then by keep_last = 1 and keep_best = 1.
std::vector<std::string> left_by_the_fourth(const Scratch& scratch) {
  CheckpointManager manager(
      {.directory = scratch.path(), .keep_last = 1, .metric = "loss", .async = false, .fsync = false});
  StateHolder training;
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
  StateHolder training;
  manager.save(training, {.step = 1});
  manager.save(training, {.step = 2, .emergency = "a signal"});
  manager.save(training, {.step = 3, .emergency = "another"});
  EXPECT_THAT(scratch.entries(),
              ElementsAre("step-00000001", "step-00000002-emergency", "step-00000003-emergency"));
  manager.save(training, {.step = 4});
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000003-emergency", "step-00000004"));
}

TEST(CheckpointManager, TheProcessEndsCleanlyWhileItWrites) {
  const Scratch scratch;
  for (const std::string way : {"exit", "interrupt", "return", "throw"}) {
    const auto outcomes =
        run_ranks_collect(1,
                          [&](int) {
                            failpoint::configure("checkpoint.within_file=delay(20)");
                            CheckpointManager manager({.directory = scratch.path() / way});
                            StateHolder training;
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
