// What a Trainer tells: its callbacks, its writers, and which metrics.
#include <cstdint>
#include <gmock/gmock.h>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/observe/summary_writer.h>
#include <lockstep/optim/lr_scheduler.h>
#include <lockstep/profiler/profiler.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/train/testing/fixtures.h>
#include <lockstep/train/trainer.h>

namespace lockstep::trainer_log_test {
namespace {

using data::DistributedEvalSampler;
using data::DistributedSampler;
using data::Example;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Loader;
using testing::loss_of;
using testing::Points;
using testing::SmallNet;
using testing::TemporaryFolder;

/// Notes what it is told.
struct Notes : MetricsWriter {
  void log_metrics(const Metrics& metrics, int64_t step) override {
    for (const auto& [name, value] : metrics) logged[name].emplace_back(step, value);
  }
  void log_hyperparameters(const Hyperparameters& given) override { hyperparameters = given; }
  void resume(int64_t next_step) override { resumed = next_step; }
  void finalize(std::string_view how) override { status = how; }
  std::map<std::string, std::vector<std::pair<int64_t, double>>> logged;
  Hyperparameters hyperparameters;
  std::string status;
  int64_t resumed = -1;
};

TEST(Trainer, CallsBackInOrderAndWritesOnRankZeroAlone) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    DistributedDataParallel model(std::make_shared<SmallNet>());
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    DistributedSampler sampler(6);
    Loader loader(Points{6}, {.batch_size = 2, .sampler = &sampler});
    DistributedEvalSampler share(5);
    Loader validation(Points{5}, {.batch_size = 2, .sampler = &share});
    lr_scheduler::ReduceLROnPlateau schedule(optimizer, {.mode = "max", .factor = 0.5, .patience = 0});
    auto notes = std::make_shared<Notes>();
    std::string order;
    const auto note = [&](char letter) {
      return [&order, letter](TrainerCore& core) { order += letter + std::to_string(core.step()); };
    };
    Trainer trainer(model, optimizer, loader, loss_of,
                    {.max_epochs = 3,
                     .clip_grad_norm = 1.0,
                     .scheduler = &schedule,
                     .validate_every_n_epochs = 1,
                     .early_stopping = EarlyStoppingOptions{.min_delta = 1e9, .patience = 2},
                     .writers = {notes},
                     .hyperparameters = {{"lr", 0.1}},
                     .log_every_n_steps = 2,
                     .progress_bar = false,
                     .callbacks = {{.before_epoch = note('E'),
                                    .after_epoch = note('e'),
                                    .before_step = note('S'),
                                    .after_step = note('s'),
                                    .before_validation = note('V'),
                                    .after_validation = note('v')}}});
    trainer.validate_on(validation);
    trainer.train();
    // The first epoch is better than infinity; the next two are not better by 1e9.
    EXPECT_EQ(order, "E0S0s1S1s2V2v2e2E2S2s3S3s4V4v4e4E4S4s5S5s6V6v6e6");
    EXPECT_EQ(trainer.epoch(), 3);
    EXPECT_TRUE(trainer.finished());
    // The loss falls, so with mode max each epoch after the first is a bad one.
    EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 0.025);
    if (rank != 0) {
      EXPECT_TRUE(notes->logged.empty() && notes->hyperparameters.empty() && notes->status.empty());
      return;
    }
    EXPECT_EQ(notes->status, "finished");
    EXPECT_EQ(notes->hyperparameters.size(), 1U);
    const auto steps_of = [&](const std::string& name) {
      std::vector<int64_t> steps;
      for (const auto& [step, unused] : notes->logged[name]) steps.push_back(step);
      return steps;
    };
    EXPECT_THAT(steps_of("validation/loss"), ElementsAre(2, 4, 6));
    EXPECT_THAT(steps_of("epoch/loss"), ElementsAre(2, 4, 6));
    for (const char* name : {"train/loss", "train/lr", "train/grad_norm", "train/samples_per_second"}) {
      EXPECT_THAT(steps_of(name), ElementsAre(2, 4, 6)) << name;
    }
    EXPECT_DOUBLE_EQ(notes->logged["epoch/lr"].back().second, 0.05)
        << "that with which the epoch was trained";
  });
}

TEST(Trainer, AProfilerRecordsItsSteps) {
  testing::run_ranks(2, [](int) {
    auto world = init_process_group();
    DistributedDataParallel model(std::make_shared<SmallNet>());
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    DistributedSampler sampler(8);
    Loader loader(Points{8}, {.sampler = &sampler});
    std::vector<std::map<std::string, int64_t>> cycles;
    const auto note = [&](Profiler& profile) {
      auto& counts = cycles.emplace_back();
      for (const auto& average : profile.key_averages()) counts[average.key] = average.count;
    };
    Trainer trainer(
        model, optimizer, loader, loss_of,
        {.progress_bar = false,
         .profiler = ProfilerOptions{.schedule = profiler::schedule({.warmup = 1, .active = 2, .repeat = 1}),
                                     .on_trace_ready = note}});
    trainer.train();
    ASSERT_EQ(cycles.size(), 1U);
    for (const char* name :
         {"ProfilerStep*", "Optimizer.step#lockstep::Trainer", "DistributedDataParallel.forward",
          "enumerate(DataLoader)#lockstep::data::DataLoader.next"}) {
      EXPECT_EQ(cycles[0][name], 2) << name;
    }
  });
}

TEST(Trainer, AProfilersHandlerThatFailsDoesNotEndTheTraining) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    DistributedDataParallel model(std::make_shared<SmallNet>());
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    DistributedSampler sampler(8);
    Loader loader(Points{8}, {.sampler = &sampler});
    int cycles = 0;
    const auto fail = [&](Profiler&) {
      ++cycles;
      TORCH_CHECK(rank != 0, "no room");
    };
    Trainer trainer(model, optimizer, loader, loss_of,
                    {.progress_bar = false,
                     .profiler = ProfilerOptions{.schedule = profiler::schedule({.active = 2, .repeat = 2}),
                                                 .on_trace_ready = fail}});
    trainer.train();
    EXPECT_EQ(trainer.step(), 4);
    EXPECT_EQ(cycles, 2);
  });
}

/// Each has written, and ended its scope, when the wait for it is over.
TEST(Trainer, AProfileShowsTheThreadsThatWrite) {
  testing::run_ranks(1, [](int) {
    auto world = init_process_group();
    const TemporaryFolder folder;
    Profiler profile;
    SummaryWriter writer(folder.path("metrics"));
    writer.add_scalar("loss", 1.0, 1);
    writer.flush();
    CheckpointManager checkpoints({.directory = folder.path("checkpoints"), .every_steps = 1});
    checkpoints.save_state({{"weight", torch::ones({2})}}, {}, {.step = 1});
    checkpoints.wait();
    profile.stop();
    profile.export_chrome_trace(folder.path("trace.json"));
    const std::string trace = testing::content_of(folder.path("trace.json"));
    EXPECT_THAT(trace, HasSubstr("\"metrics: write\""));
    EXPECT_THAT(trace, HasSubstr("\"checkpoint: write\""));
  });
}

TEST(Trainer, StepsAfterTheLogsLastLineAreLoggedAtTheEnd) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    using Steps = std::vector<int64_t>;
    const auto train = [&](int64_t log_every, int64_t stop_after, const Steps& expected) {
      DistributedDataParallel model(std::make_shared<SmallNet>());
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      DistributedSampler sampler(10);
      Loader loader(Points{10}, {.sampler = &sampler});
      auto notes = std::make_shared<Notes>();
      Trainer trainer(model, optimizer, loader, loss_of,
                      {.clip_grad_norm = 1.0,
                       .writers = {notes},
                       .log_every_n_steps = log_every,
                       .progress_bar = false,
                       .callbacks = {{.after_step = [&](TrainerCore& core) {
                         if (core.step() == stop_after) core.stop();
                       }}}});
      trainer.train();
      if (trainer.stopped()) trainer.train();
      if (log_every > 5 && stop_after < 0) {
        EXPECT_DOUBLE_EQ(trainer.metrics().at("train/loss"), trainer.metrics().at("epoch/loss"));
      }
      if (rank != 0) return;
      for (const char* name : {"train/loss", "train/lr", "train/grad_norm", "train/samples_per_second"}) {
        Steps steps;
        for (const auto& [step, unused] : notes->logged[name]) steps.push_back(step);
        EXPECT_EQ(steps, expected) << name;
      }
    };
    constexpr int64_t kNever = -1;
    train(/*log_every=*/50, kNever, {5});
    train(/*log_every=*/2, kNever, {2, 4, 5});
    train(/*log_every=*/5, kNever, {5});
    train(/*log_every=*/50, /*stop_after=*/3, {3, 5});
  });
}

TEST(Trainer, TheLogsFirstLineAfterAResumeCountsFromThere) {
  const TemporaryFolder folder;
  SmallNet net;
  torch::optim::SGD optimizer(net.parameters(), 0.1);
  Loader loader(Points{10}, {.batch_size = 2});
  std::vector<double> losses;
  bool fails = true;
  Trainer trainer(
      net, optimizer, loader, loss_of,
      {.max_epochs = 1,
       .checkpoint = CheckpointManagerOptions{.directory = folder.path() / "checkpoints", .every_steps = 2},
       .progress_bar = false,
       .callbacks = {{.after_step = [&](TrainerCore& core) {
         losses.push_back(core.step_loss());
         if (core.step() == 4 && std::exchange(fails, false)) throw std::runtime_error("mine");
       }}}});
  EXPECT_THROW(trainer.train(), std::runtime_error);
  ASSERT_EQ(trainer.restore()->step, 2);
  losses.clear();
  trainer.train();
  ASSERT_EQ(losses.size(), 3U);
  EXPECT_NEAR(trainer.metrics().at("train/loss"), (losses[0] + losses[1] + losses[2]) / 3, 1e-12);
}

TEST(Trainer, EpochsWithoutValidationSayNothingAboutIt) {
  torch::nn::Linear net(3, 1);
  net->to(torch::kDouble);
  torch::optim::SGD optimizer(net->parameters(), 1.0);
  Loader loader(Points{4}, {.batch_size = 2});
  lr_scheduler::ReduceLROnPlateau schedule(optimizer, {.factor = 0.5, .patience = 0});
  auto notes = std::make_shared<Notes>();
  const auto zero = [](auto& model, const Example& batch) {
    return model.forward(batch.data.slice(1, 1)).sum() * 0.0;
  };
  Trainer trainer(*net, optimizer, loader, zero,
                  {.max_epochs = 7,
                   .scheduler = &schedule,
                   .validate_every_n_epochs = 3,
                   .early_stopping = EarlyStoppingOptions{.patience = 2},
                   .writers = {notes},
                   .progress_bar = false});
  trainer.validate_on(loader);
  trainer.train();  // validated after epochs 3, 6 and 7, none better than the first
  EXPECT_EQ(trainer.epoch(), 7);
  EXPECT_EQ(notes->logged["validation/loss"].size(), 3U);
  EXPECT_EQ(notes->logged["epoch/loss"].size(), 7U);
  EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 0.25);
  EXPECT_TRUE(trainer.finished());
}

}  // namespace
}  // namespace lockstep::trainer_log_test
