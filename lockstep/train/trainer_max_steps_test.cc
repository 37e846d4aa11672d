// A Trainer whose steps are bounded, also where the last of them is an epoch's last one.
#include <cstdint>
#include <filesystem>
#include <gmock/gmock.h>
#include <iterator>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/train/testing/fixtures.h>
#include <lockstep/train/testing/uneven_job.h>
#include <lockstep/train/trainer.h>

namespace lockstep::trainer_max_steps_test {
namespace {

using data::DistributedSampler;
using data::Example;
using testing::loss_of;
using testing::Points;
using testing::SharedFolder;
using testing::SmallNet;
using testing::UnevenJob;

TEST(Trainer, StepsThatEndWithAnEpochEndIt) {
  const SharedFolder folder;
  const auto body = [&](int rank) {
    auto world = init_process_group();
    constexpr int64_t kNever = -1;
    const auto last_of = [](const std::filesystem::path& path) { return list_checkpoints(path).back(); };
    for (const int64_t max_steps : {2, 3}) {  // of three an epoch, the last with a batch on rank 0 alone
      const bool whole = max_steps == 3;
      const CheckpointManagerOptions checkpoint{.directory = folder.path() / std::to_string(max_steps),
                                                .every_epochs = 1};
      UnevenJob job(checkpoint, kNever, max_steps);
      job.trainer.train();
      EXPECT_TRUE(job.trainer.finished());
      EXPECT_EQ(job.trainer.step(), max_steps);
      EXPECT_EQ(job.trainer.epoch(), whole ? 1 : 0);
      if (rank == 0) {
        const auto last = last_of(checkpoint.directory);
        EXPECT_EQ(last.step, max_steps);
        EXPECT_EQ(last.metrics.count("validation/loss"), whole ? 1U : 0U) << max_steps;
      }
      UnevenJob longer(checkpoint, kNever, 6);  // no batch is lost
      ASSERT_TRUE(longer.trainer.restore().has_value());
      longer.trainer.train();
      EXPECT_EQ(longer.trainer.step(), 6);
      EXPECT_EQ(longer.trainer.epoch(), 2);
    }
    // Stopped after the last step, its validation is still to come.
    const CheckpointManagerOptions checkpoint{.directory = folder.path() / "stopped", .every_epochs = 1};
    UnevenJob stopped(checkpoint, /*stop_after=*/3, /*max_steps=*/3);
    stopped.trainer.train();
    EXPECT_TRUE(stopped.trainer.stopped());
    EXPECT_FALSE(stopped.trainer.finished());
    stopped.trainer.save();
    UnevenJob resumed(checkpoint, kNever, /*max_steps=*/3);
    ASSERT_TRUE(resumed.trainer.restore().has_value());
    resumed.trainer.train();
    EXPECT_TRUE(resumed.trainer.finished());
    EXPECT_EQ(resumed.trainer.step(), 3);
    if (rank == 0) {
      EXPECT_EQ(last_of(checkpoint.directory).metrics.count("validation/loss"), 1U);
    }
  };
  testing::run_ranks(3, body, {.environment = folder.environment()});
}

TEST(Trainer, ACheckpointOfTheLastStepStillEndsTheEpoch) {
  const SharedFolder folder;
  const auto body = [&](int rank) {
    auto world = init_process_group();
    const CheckpointManagerOptions checkpoint{.directory = folder.path(), .every_steps = 3};
    const auto start = [&](const TrainerCallbacks::Function& before_validation) {
      return std::make_unique<UnevenJob>(checkpoint, /*stop_after=*/-1, /*max_steps=*/3, before_validation);
    };
    auto killed = start([](TrainerCore&) { throw std::runtime_error("killed"); });
    EXPECT_THROW(killed->trainer.train(), std::runtime_error);
    killed.reset();
    auto resumed = start({});
    ASSERT_TRUE(resumed->trainer.restore().has_value());
    EXPECT_EQ(resumed->trainer.step(), 3);
    EXPECT_EQ(resumed->trainer.epoch(), 0);
    EXPECT_FALSE(resumed->trainer.finished());
    resumed->trainer.train();
    EXPECT_TRUE(resumed->trainer.finished());
    EXPECT_EQ(resumed->trainer.step(), 3);
    EXPECT_EQ(resumed->trainer.epoch(), 1);
    if (rank == 0) {
      EXPECT_EQ(list_checkpoints(folder.path()).back().metrics.count("validation/loss"), 1U);
    }
  };
  testing::run_ranks(3, body, {.environment = folder.environment()});
}

/// Points of which one can't be read.
struct Spoilt {
  Points points;
  int64_t bad = 0;
  int64_t size() const { return points.size(); }
  Example get_batch(std::span<const int64_t> indices) const {
    for (const int64_t index : indices) TORCH_CHECK(index != bad, "spoilt");
    return points.get_batch(indices);
  }
};

TEST(Trainer, ABatchAfterTheLastStepFailsNoTraining) {
  const SharedFolder folder;
  const auto body = [&](int rank) {
    auto world = init_process_group();
    for (const bool restarted : {false, true}) {  // then it is the first batch that the loader is asked for
      DistributedDataParallel model(std::make_shared<SmallNet>());
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      DistributedSampler sampler(12, {.shuffle = false});
      // Rank 1's third batch can't be made.
      data::DataLoader<Spoilt> loader(Spoilt{{12}, 9}, {.batch_size = 2, .sampler = &sampler});
      Trainer trainer(model, optimizer, loader, loss_of,
                      {.max_steps = 2,
                       .checkpoint = CheckpointManagerOptions{.directory = folder.path(), .every_steps = 2},
                       .progress_bar = false});
      EXPECT_EQ(trainer.restore().has_value(), restarted);
      trainer.train();
      EXPECT_TRUE(trainer.finished());
      EXPECT_EQ(trainer.step(), 2);
      EXPECT_EQ(trainer.epoch(), 0);
      // The loader still has the batch to come.
      if (rank == 1) {
        EXPECT_THROW(loader.begin(), c10::Error);
      } else {
        EXPECT_EQ(testing::ids(*loader.begin()), (std::vector<int64_t>{8, 10}));
      }
    }
  };
  testing::run_ranks(2, body, {.environment = folder.environment()});
}

/// Batches that can't be given back, and how many were asked for.
struct Stream {
  using Batch = Example;
  struct Iterator {
    Stream* stream;
    Example batch = stream->make();
    Example& operator*() { return batch; }
    Iterator& operator++() { return batch = stream->make(), *this; }
    bool operator==(std::default_sentinel_t) const { return false; }
  };
  Iterator begin() { return {this}; }
  static std::default_sentinel_t end() { return {}; }
  Example make() { return ++made, Points{8}.get_batch(std::vector<int64_t>{0, 1}); }

  int64_t made = 0;
};

TEST(Trainer, ALoaderThatTakesNoBatchBackIsNotAskedForOneAfterTheLastStep) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  DistributedDataParallel model(std::make_shared<SmallNet>());
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  Stream stream;
  Trainer trainer(model, optimizer, stream, loss_of, {.max_steps = 3, .progress_bar = false});
  trainer.train();
  EXPECT_TRUE(trainer.finished());
  EXPECT_EQ(stream.made, 3);
}

}  // namespace
}  // namespace lockstep::trainer_max_steps_test
