// A Trainer that goes on from its checkpoints, also where ranks or batches are uneven.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/optim/lr_scheduler.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/train/testing/fixtures.h>
#include <lockstep/train/testing/uneven_job.h>
#include <lockstep/train/trainer.h>

namespace lockstep::trainer_resume_test {
namespace {

using data::DistributedEvalSampler;
using data::DistributedSampler;
using data::Example;
using testing::equal;
using ::testing::HasSubstr;
using testing::Loader;
using testing::loss_of;
using testing::message_of;
using testing::Points;
using testing::SharedFolder;
using testing::SmallNet;
using testing::UnevenJob;

/// Points but for some, so that batches may have fewer samples than indices, and none.
struct Gaps {
  Points points;
  std::set<int64_t> left_out;
  int64_t size() const { return points.size(); }
  Example get_batch(std::span<const int64_t> indices) const {
    std::vector<int64_t> kept;
    for (const int64_t index : indices) {
      if (left_out.count(index) == 0) kept.push_back(index);
    }
    return points.get_batch(kept);
  }
};

const auto loss_and_index = [](auto& model, const Example& batch) {
  return StepOutput{.loss = loss_of(model, batch),
                    .metrics = {{"index", batch.data.select(1, 0).mean().item<double>()}}};
};

/// On two ranks of six batches each: rank 0 has 0 and 2, 4 and 6, …, rank 1 has 1 and 3, 5 and 7, …
struct JobWithGaps {
  static constexpr int64_t kCount = 24;
  JobWithGaps(const CheckpointManagerOptions& checkpoint, const std::set<int64_t>& left_out,
              int64_t accumulate, int64_t stop_after)
      : loader(Gaps{{kCount}, left_out}, {.batch_size = 2, .sampler = &sampler, .num_workers = 1}),
        validation(Gaps{{kCount}, left_out}, {.batch_size = 2, .sampler = &share}),
        trainer(model, optimizer, loader, loss_and_index,
                {.max_epochs = 2,
                 .accumulate_grad_batches = accumulate,
                 .checkpoint = checkpoint,
                 .progress_bar = false,
                 .callbacks = {{.after_step = [stop_after](TrainerCore& core) {
                   if (core.step() == stop_after) core.stop();
                 }}}}) {
    trainer.validate_on(validation);
    double sum = 0;
    for (int64_t i = 0; i < kCount; ++i) sum += left_out.count(i) == 0 ? static_cast<double>(i) : 0.0;
    mean_index = sum / static_cast<double>(kCount - static_cast<int64_t>(left_out.size()));
  }
  void expect_all_samples_seen() const {
    EXPECT_NEAR(trainer.metrics().at("epoch/index"), mean_index, 1e-12);
    EXPECT_NEAR(trainer.metrics().at("validation/index"), mean_index, 1e-12);
  }

  DistributedDataParallel<SmallNet> model{std::make_shared<SmallNet>()};
  torch::optim::SGD optimizer{model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)};
  DistributedSampler sampler{kCount, {.shuffle = false}};
  data::DataLoader<Gaps> loader;
  DistributedEvalSampler share{kCount};
  data::DataLoader<Gaps> validation;
  Trainer<DistributedDataParallel<SmallNet>, data::DataLoader<Gaps>,
          std::remove_const_t<decltype(loss_and_index)>>
      trainer;
  double mean_index = 0;
};

TEST(Trainer, BatchesWithoutSamplesArePassedOver) {
  const SharedFolder folder;
  const auto body = [&](int) {
    auto world = init_process_group();
    struct Case {
      const char* name;
      std::set<int64_t> left_out;
      int64_t steps;
    };
    for (const Case& gaps : {Case{"both ranks' third", {8, 9, 10, 11}, 5}, Case{"rank 1's third", {9, 11}, 6},
                             Case{"rank 0's first", {0, 2}, 6}, Case{"both ranks' last", {20, 21, 22, 23}, 5},
                             Case{"three of rank 0", {4, 6, 8, 10, 12, 14}, 6}}) {
      SCOPED_TRACE(gaps.name);
      JobWithGaps job({.directory = folder.path() / "none"}, gaps.left_out, /*accumulate=*/1,
                      /*stop_after=*/-1);
      job.trainer.train();
      EXPECT_EQ(job.trainer.step(), 2 * gaps.steps);
      job.expect_all_samples_seen();
    }
    JobWithGaps none({.directory = folder.path() / "none"}, {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23}, 1,
                     -1);
    EXPECT_THAT(message_of<c10::Error>([&] { none.trainer.train(); }),
                HasSubstr("rank 1 got no sample in epoch 1"));
  };
  testing::run_ranks(2, body, {.environment = folder.environment()});
}

TEST(Trainer, BatchesWithoutSamplesArePassedOverAfterAResumeToo) {
  const SharedFolder folder;
  const auto body = [&](int) {
    auto world = init_process_group();
    const std::set<int64_t> left_out = {8, 9, 10, 11, 13, 15};  // rank 1 has a batch less
    JobWithGaps reference({.directory = folder.path() / "reference"}, left_out, /*accumulate=*/2,
                          /*stop_after=*/-1);
    reference.trainer.train();
    EXPECT_EQ(reference.trainer.step(), 6);
    reference.expect_all_samples_seen();
    for (const int64_t stop_after : {1, 2, 4}) {
      const auto name = std::to_string(stop_after);
      const auto go_on = [&](JobWithGaps& job) {
        job.trainer.train();
        EXPECT_EQ(job.trainer.step(), 6);
        job.expect_all_samples_seen();
        EXPECT_TRUE(equal(job.model.parameters(), reference.model.parameters())) << name;
      };
      {
        JobWithGaps stopped({.directory = folder.path() / name}, left_out, 2, stop_after);
        stopped.trainer.train();
        EXPECT_EQ(stopped.trainer.step(), stop_after);
        stopped.trainer.save();
        go_on(stopped);  // in the same process
      }
      JobWithGaps resumed({.directory = folder.path() / name}, left_out, 2, -1);
      ASSERT_TRUE(resumed.trainer.restore().has_value());
      go_on(resumed);
    }
  };
  testing::run_ranks(2, body, {.environment = folder.environment()});
}

/// A job that can be stopped after a step and go on in another process, with everything that has a state.
struct Job {
  Job(const std::filesystem::path& folder, int64_t stop_after, std::vector<int64_t>* seen = nullptr)
      : model(std::make_shared<SmallNet>(0.3)),
        optimizer(model.parameters(), torch::optim::AdamOptions(0.01)),
        schedule(optimizer, 2, 0.5),
        sampler(26, {.seed = 5}),
        loader(Points{26}, {.batch_size = 2, .sampler = &sampler, .num_workers = 1}),
        share(7),
        validation(Points{7}, {.batch_size = 2, .sampler = &share}),
        trainer(model, optimizer, loader, LossAndNote{seen},
                {.max_epochs = 3,
                 .scheduler = &schedule,
                 .early_stopping = EarlyStoppingOptions{.patience = 9},
                 .checkpoint = CheckpointManagerOptions{.directory = folder},
                 .progress_bar = false,
                 .callbacks = {{.after_step = [stop_after](TrainerCore& core) {
                   if (core.step() == stop_after) core.stop();
                 }}}}) {
    trainer.validate_on(validation);
  }

  DistributedDataParallel<SmallNet> model;
  torch::optim::Adam optimizer;
  lr_scheduler::StepLR schedule;
  DistributedSampler sampler;
  Loader loader;
  DistributedEvalSampler share;
  Loader validation;
  struct LossAndNote {
    std::vector<int64_t>* seen;
    torch::Tensor operator()(DistributedDataParallel<SmallNet>& net, const Example& batch) const {
      for (const int64_t id : testing::ids(batch)) {
        if (seen != nullptr) seen->push_back(id);
      }
      return loss_of(net, batch);
    }
    torch::Tensor operator()(SmallNet& net, const Example& batch) const { return loss_of(net, batch); }
  };
  Trainer<DistributedDataParallel<SmallNet>, Loader, LossAndNote> trainer;
};

/// Without those that depend on where the log's windows begin, and on the clock.
Metrics lasting_metrics(const TrainerCore& core) {
  Metrics metrics = core.metrics();
  std::erase_if(metrics, [](const auto& metric) { return metric.first.starts_with("train/"); });
  return metrics;
}

void expect_same_ending(Job& job, Job& reference) {
  EXPECT_EQ(job.trainer.step(), reference.trainer.step());
  EXPECT_EQ(lasting_metrics(job.trainer), lasting_metrics(reference.trainer));
  EXPECT_TRUE(equal(job.model.parameters(), reference.model.parameters()));
  EXPECT_EQ(job.schedule.get_last_lr(), reference.schedule.get_last_lr());
}

TEST(Trainer, GoesOnAsIfNothingHadHappened) {
  const SharedFolder folder;
  const auto body = [&](int rank) {
    auto world = init_process_group();
    constexpr int64_t kNever = -1;
    const auto start = [&](int64_t stop_after, const std::string& name) {
      torch::manual_seed(50 + rank);
      auto job = std::make_unique<Job>(folder.path() / name, stop_after);
      torch::manual_seed(60 + rank);
      return job;
    };
    auto reference = start(kNever, "reference");
    reference->trainer.train();
    EXPECT_EQ(reference->trainer.step(), 21);
    for (const int64_t stop_after : {3, 6, 7, 20}) {  // 7 is the end of the first epoch
      const auto name = std::to_string(stop_after);
      auto job = start(stop_after, name);
      job->trainer.train();
      EXPECT_TRUE(job->trainer.stopped());
      EXPECT_EQ(job->trainer.step(), stop_after);
      job->trainer.save();
      job->trainer.train();  // the same process may go on
      expect_same_ending(*job, *reference);

      job = start(kNever, name);
      torch::rand({1});
      const auto info = job->trainer.restore();
      ASSERT_TRUE(info.has_value());
      EXPECT_EQ(info->step, stop_after);
      EXPECT_TRUE(info->emergency.empty());
      job->trainer.train();
      expect_same_ending(*job, *reference);
      job = start(kNever, name + "-empty");
      EXPECT_FALSE(job->trainer.restore().has_value());
    }
  };
  testing::run_ranks(2, body, {.environment = folder.environment()});
}

TEST(Trainer, WhatEndsWithAnEpochWithoutValidationHasNotTheMetricsOfAnOlderOne) {
  const SharedFolder folder;
  auto world = init_process_group({.rank = 0, .world_size = 1});
  DistributedDataParallel model(std::make_shared<SmallNet>());
  torch::optim::SGD optimizer(model.parameters(), 0.0);
  Loader loader(Points{8}, {.batch_size = 2});
  Trainer trainer(model, optimizer, loader, loss_of,
                  {.max_epochs = 9,
                   .validate_every_n_epochs = 2,
                   .early_stopping = EarlyStoppingOptions{.monitor = "epoch/loss", .patience = 2},
                   .checkpoint = CheckpointManagerOptions{.directory = folder.path(), .every_steps = 1000},
                   .progress_bar = false});
  trainer.validate_on(loader);
  trainer.train();
  EXPECT_EQ(trainer.epoch(), 3) << "two epochs without an improvement";
  EXPECT_EQ(trainer.metrics().count("validation/loss"), 1u) << "of the second epoch";
  const auto checkpoints = list_checkpoints(folder.path());
  ASSERT_EQ(checkpoints.size(), 1u);
  EXPECT_EQ(checkpoints[0].metrics.count("epoch/loss"), 1u);
  EXPECT_EQ(checkpoints[0].metrics.count("validation/loss"), 0u);
}

/// Two batches, and a call when the epoch's iterator goes.
struct CallsAtTheEnd {
  using Batch = Example;
  struct Iterator {
    std::vector<Example>::iterator at;
    std::shared_ptr<void> end = {};
    Example& operator*() const { return *at; }
    Iterator& operator++() { return ++at, *this; }
    bool operator==(const Iterator& other) const { return at == other.at; }
  };
  Iterator begin() {
    return {batches.begin(), std::shared_ptr<void>(nullptr, [this](void*) { call(); })};
  }
  Iterator end() { return {batches.end()}; }

  std::function<void()> call;
  std::vector<Example> batches = {Points{8}.get_batch(std::vector<int64_t>{0, 1}),
                                  Points{8}.get_batch(std::vector<int64_t>{2, 3})};
};

TEST(Trainer, AnEpochsMetricsThatCouldNotBeReducedAreReducedLater) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    DistributedDataParallel model(std::make_shared<SmallNet>());
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    CallsAtTheEnd loader{.call = [rank] {
      if (rank == 1) lockstep::abort();
    }};
    Trainer trainer(model, optimizer, loader, loss_of, {.max_epochs = 1, .progress_bar = false});
    EXPECT_THROW(trainer.train(), c10::DistBackendError);
    EXPECT_EQ(trainer.step(), 2);
    loader.call = [] {};
    trainer.update_process_group(shrink_group({}, {}, SHRINK_ABORT));
    trainer.train();
    EXPECT_TRUE(trainer.finished());
    EXPECT_EQ(trainer.step(), 2);
    EXPECT_EQ(trainer.metrics().count("epoch/loss"), 1u);
  });
}

TEST(Trainer, WhatEndsWithinAnEpochHasNotTheMetricsOfItsBeginning) {
  const SharedFolder folder;
  auto world = init_process_group({.rank = 0, .world_size = 1});
  DistributedDataParallel model(std::make_shared<SmallNet>());
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  Loader loader(Points{8}, {.batch_size = 2});
  Trainer trainer(model, optimizer, loader, loss_of,
                  {.max_epochs = 3,
                   .max_steps = 6,
                   .checkpoint = CheckpointManagerOptions{.directory = folder.path(), .every_epochs = 1},
                   .progress_bar = false});
  trainer.train();
  const auto checkpoints = list_checkpoints(folder.path());
  ASSERT_EQ(checkpoints.size(), 2u);
  for (const auto& each : checkpoints)
    EXPECT_EQ(each.metrics.count("epoch/loss"), each.step == 4) << each.step;
}

TEST(Trainer, RanksThatHaveRunOutStandInAfterAResume) {
  const SharedFolder folder;
  const auto body = [&](int rank) {
    auto world = init_process_group();
    const auto start = [&](int64_t stop_after, const std::string& name) {
      torch::manual_seed(50 + rank);
      const CheckpointManagerOptions checkpoint{.directory = folder.path() / name};
      auto job = std::make_unique<UnevenJob>(checkpoint, stop_after);
      torch::manual_seed(60 + rank);
      return job;
    };
    auto reference = start(/*stop_after=*/-1, "reference");
    reference->trainer.train();
    EXPECT_EQ(reference->trainer.step(), 6);
    auto job = start(/*stop_after=*/2, "stopped");
    job->trainer.train();
    EXPECT_TRUE(job->trainer.stopped());
    job->trainer.save();
    job->trainer.train();
    EXPECT_TRUE(equal(job->model.parameters(), reference->model.parameters()));
    job = start(/*stop_after=*/-1, "stopped");
    ASSERT_TRUE(job->trainer.restore().has_value());
    EXPECT_EQ(job->trainer.step(), 2);
    job->trainer.train();
    EXPECT_EQ(job->trainer.step(), 6);
    EXPECT_TRUE(equal(job->model.parameters(), reference->model.parameters()));
  };
  testing::run_ranks(3, body, {.environment = folder.environment()});
}

/// The samples that this rank has seen go into a file.
void write_ids(const std::filesystem::path& path, const std::vector<int64_t>& ids) {
  std::ofstream file(path);
  for (const int64_t id : ids) file << id << ' ';
}

std::multiset<int64_t> read_ids(const std::vector<std::filesystem::path>& paths) {
  std::multiset<int64_t> ids;
  for (const auto& path : paths) {
    std::ifstream file(path);
    for (int64_t id = 0; file >> id;) ids.insert(id);
  }
  return ids;
}

TEST(Trainer, AnotherNumberOfRanksSeesTheRestOfTheEpoch) {
  const SharedFolder folder;
  const auto part = [&](const std::string& name, int rank) {
    return folder.path() / (name + std::to_string(rank));
  };
  const auto first = [&](int rank) {
    auto world = init_process_group();
    std::vector<int64_t> seen;
    Job job(folder.path() / "checkpoints", /*stop_after=*/9, &seen);  // two steps into the second epoch
    job.trainer.train();
    job.trainer.save();
    seen.erase(seen.begin(), seen.begin() + 13);  // the first epoch
    write_ids(part("before", rank), seen);
  };
  testing::run_ranks(2, first, {.environment = folder.environment()});
  const auto then = [&](int rank) {
    auto world = init_process_group();
    std::vector<int64_t> seen;
    Job job(folder.path() / "checkpoints", /*stop_after=*/12, &seen);
    ASSERT_EQ(job.trainer.restore()->world_size, 2);
    EXPECT_EQ(job.trainer.step(), 9);
    job.trainer.train();  // the rest: 18 samples, 3 steps of 6
    EXPECT_EQ(job.trainer.epoch(), 1);
    write_ids(part("after", rank), seen);
    job.trainer.train();
    EXPECT_EQ(job.trainer.epoch(), 3);
    EXPECT_EQ(job.trainer.step(), 9 + 3 + 5) << "an epoch of three ranks has 5 steps";
  };
  testing::run_ranks(3, then, {.environment = folder.environment()});
  const auto ids =
      read_ids({part("before", 0), part("before", 1), part("after", 0), part("after", 1), part("after", 2)});
  EXPECT_EQ(ids.size(), 26U);
  EXPECT_EQ(std::set<int64_t>(ids.begin(), ids.end()).size(), 26U);
}

TEST(Trainer, EpochMetricsGoOnOnAnotherNumberOfRanks) {
  const SharedFolder folder;
  const auto first = [&](int rank) {
    auto world = init_process_group();
    const auto train_two_steps = [&](const CheckpointManagerOptions& checkpoint) {
      auto job = std::make_unique<JobWithGaps>(checkpoint, std::set<int64_t>{}, /*accumulate=*/1,
                                               /*stop_after=*/2);
      job->trainer.train();  // samples 0 to 7
      return job;
    };
    train_two_steps({.directory = folder.path() / "by-plan", .every_steps = 2});
    train_two_steps({.directory = folder.path() / "at-once"})->trainer.save();
    auto survivor = train_two_steps({.directory = folder.path() / "alone"});
    if (rank == 0) survivor->trainer.save_alone("rank 1 is gone");
    barrier();
    JobWithGaps users({.directory = folder.path() / "first-step"}, {}, /*accumulate=*/1, /*stop_after=*/1);
    users.trainer.train();
    users.trainer.save();
    users.trainer.interrupted = [&users] { return users.trainer.step() == 2; };
    users.trainer.train();
    CheckpointManager manager({.directory = folder.path() / "by-user"});
    manager.save(users.trainer.state(), {.step = 2});
    manager.wait();
  };
  testing::run_ranks(2, first, {.environment = folder.environment()});
  for (const int ranks : {1, 4}) {
    const auto then = [&](int) {
      auto world = init_process_group();
      for (const std::string name : {"by-plan", "at-once", "alone", "by-user"}) {
        SCOPED_TRACE(name);
        JobWithGaps job({.directory = folder.path() / name}, {}, /*accumulate=*/1, /*stop_after=*/-1);
        ASSERT_EQ(job.trainer.restore()->world_size, 2);
        EXPECT_EQ(job.trainer.step(), 2);
        job.trainer.train_epoch();
        if (name == "alone") {  // of the first 8 samples rank 0 had 0, 2, 4 and 6
          EXPECT_NEAR(job.trainer.metrics().at("epoch/index"), 260.0 / 20, 1e-12);
        } else if (name == "by-user") {  // its sums are an earlier step's, and dropped
          EXPECT_NEAR(job.trainer.metrics().at("epoch/index"), 248.0 / 16, 1e-12);
        } else {
          job.expect_all_samples_seen();
        }
      }
    };
    testing::run_ranks(ranks, then, {.environment = folder.environment()});
  }
}

}  // namespace
}  // namespace lockstep::trainer_resume_test
