// The Trainer against loops written by hand, and what it does around them.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <gmock/gmock.h>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/optim/lr_scheduler.h>
#include <lockstep/parallel/ddp/gradient_accumulation.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/train/testing/fixtures.h>
#include <lockstep/train/trainer.h>

namespace lockstep::trainer_test {
namespace {

namespace nn = torch::nn;
using data::DistributedEvalSampler;
using data::DistributedSampler;
using data::Example;
using testing::copies;
using ::testing::ElementsAre;
using testing::equal;
using ::testing::HasSubstr;
using testing::Loader;
using testing::message_of;
using testing::Points;
using testing::SharedFolder;
using testing::SmallNet;
using testing::TemporaryFolder;

const auto loss_of = [](auto& model, const Example& batch) {
  return nn::functional::mse_loss(model.forward(batch.data), batch.target);
};

struct Way {
  const char* name;
  int64_t accumulate = 1;
  std::optional<double> clip_norm = {};
  std::optional<double> clip_value = {};
  bool every_step = false;  // the schedule
  std::optional<c10::ScalarType> dtype = {};
};

std::vector<torch::Tensor> by_hand(const Way& way) {
  torch::manual_seed(7);
  DistributedDataParallel model(std::make_shared<SmallNet>(0.3));
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  lr_scheduler::StepLR schedule(optimizer, 1, 0.8);
  GradScaler scaler({.device = at::kCPU, .enabled = way.dtype == at::kHalf});
  DistributedSampler sampler(31);
  Loader loader(Points{31}, {.batch_size = 3, .sampler = &sampler});
  GradientAccumulation accumulation(model,
                                    {.steps = way.accumulate, .samples = sampler.size(), .batch_size = 3});
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    sampler.set_epoch(epoch);
    accumulation.reset();
    optimizer.zero_grad();
    for (auto& batch : loader) {
      auto micro = accumulation.next();
      torch::Tensor loss;
      {
        auto scope = autocast(at::kCPU, {.dtype = way.dtype, .enabled = way.dtype.has_value()});
        loss = loss_of(model, batch);
      }
      scaler.scale(micro.scale(loss)).backward();
      if (!micro.is_last()) continue;
      scaler.unscale_(optimizer);
      if (way.clip_norm) clip_grad_norm_(model.parameters(), *way.clip_norm);
      if (way.clip_value) clip_grad_value_(model.parameters(), *way.clip_value);
      scaler.step(optimizer);
      scaler.update();
      if (way.every_step) schedule.step();
      optimizer.zero_grad();
    }
    if (!way.every_step) schedule.step();
  }
  return copies(model.parameters());
}

std::vector<torch::Tensor> by_trainer(const Way& way) {
  torch::manual_seed(7);
  DistributedDataParallel model(std::make_shared<SmallNet>(0.3));
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  lr_scheduler::StepLR schedule(optimizer, 1, 0.8);
  DistributedSampler sampler(31);
  Loader loader(Points{31}, {.batch_size = 3, .sampler = &sampler});
  Trainer trainer(model, optimizer, loader, loss_of,
                  {.max_epochs = 2,
                   .accumulate_grad_batches = way.accumulate,
                   .autocast_dtype = way.dtype,
                   .clip_grad_norm = way.clip_norm,
                   .clip_grad_value = way.clip_value,
                   .scheduler = &schedule,
                   .scheduler_interval =
                       way.every_step ? TrainerOptions::Interval::step : TrainerOptions::Interval::epoch,
                   .log_every_n_steps = 2,
                   .progress_bar = false});
  trainer.train();
  EXPECT_EQ(trainer.epoch(), 2);
  EXPECT_EQ(trainer.step(), 2 * ((6 + way.accumulate - 1) / way.accumulate));
  EXPECT_TRUE(trainer.finished());
  return copies(model.parameters());
}

TEST(Trainer, GivesTheWeightsOfALoopWrittenByHand) {
  testing::run_ranks(2, [](int) {
    auto world = init_process_group();
    for (const Way& way : {Way{.name = "plain"}, Way{.name = "accumulating", .accumulate = 4},
                           Way{.name = "clipped", .clip_norm = 0.1, .every_step = true},
                           Way{.name = "by value", .accumulate = 2, .clip_value = 0.01},
                           Way{.name = "bf16", .dtype = at::kBFloat16},
                           Way{.name = "fp16", .accumulate = 2, .clip_norm = 1, .dtype = at::kHalf}}) {
      EXPECT_TRUE(equal(by_trainer(way), by_hand(way))) << way.name;
    }
  });
}

using Wrapped = DistributedDataParallel<SmallNet>;
using LossOfTheModule = torch::Tensor (*)(SmallNet&, const Example&);
static_assert(TrainerFunction<decltype(loss_of), Wrapped, Example>);
static_assert(TrainerFunction<LossOfTheModule, SmallNet, Example>);
static_assert(!TrainerFunction<LossOfTheModule, Wrapped, Example>);

/// What one process would compute on the same samples: step s has batch s of every rank.
TEST(Trainer, UnevenRanksTakeTheStepsOfTheWholeBatch) {
  testing::run_ranks(3, [](int) {
    auto world = init_process_group();
    for (const int64_t count : {10, 13, 14}) {  // with 13, rank 0 has a batch more than the others
      DistributedDataParallel model(std::make_shared<SmallNet>());
      torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
      DistributedEvalSampler sampler(count);
      Loader loader(Points{count}, {.batch_size = 2, .sampler = &sampler});
      std::vector<double> epoch_losses;
      Trainer trainer(
          model, optimizer, loader, loss_of,
          {.max_epochs = 2, .progress_bar = false, .callbacks = {{.after_epoch = [&](TrainerCore& core) {
                                                     epoch_losses.push_back(core.metrics().at("epoch/loss"));
                                                   }}}});
      trainer.train();

      auto net = std::make_shared<SmallNet>();
      torch::optim::SGD alone(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
      for (size_t epoch = 0; epoch < 2; ++epoch) {
        double sum = 0;
        for (int64_t first = 0; first < count; first += 6) {
          std::vector<int64_t> indices;
          for (int64_t i = first; i < std::min(first + 6, count); ++i) indices.push_back(i);
          alone.zero_grad();
          const auto loss = loss_of(*net, Points{count}.get_batch(indices));
          loss.backward();
          alone.step();
          sum += loss.item<double>() * static_cast<double>(indices.size());
        }
        EXPECT_NEAR(epoch_losses.at(epoch), sum / static_cast<double>(count), 1e-12) << count;
      }
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        EXPECT_TRUE(torch::allclose(net->parameters()[i], model.parameters()[i], 1e-12, 1e-12)) << count;
      }
    }
    DistributedDataParallel model(std::make_shared<SmallNet>());
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    DistributedEvalSampler sampler(2);
    Loader loader(Points{2}, {.sampler = &sampler});
    Trainer trainer(model, optimizer, loader, loss_of, {.progress_bar = false});
    EXPECT_THAT(message_of<c10::Error>([&] { trainer.train(); }),
                HasSubstr("rank 2 got no sample in epoch 1"));
  });
}

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

TEST(Trainer, ValidationCountsEachSampleOnce) {
  testing::run_ranks(3, [](int rank) {
    auto world = init_process_group();
    DistributedDataParallel model(std::make_shared<SmallNet>(0.5));
    torch::optim::SGD optimizer(model.parameters(), 0.0);
    DistributedSampler sampler(6);
    Loader loader(Points{6}, {.batch_size = 2, .sampler = &sampler});
    Trainer trainer(model, optimizer, loader, loss_of, {.progress_bar = false});
    EXPECT_THAT(message_of<c10::Error>([&] { trainer.validate(); }), HasSubstr("validate_on"));
    for (const int64_t count : {1, 2, 10, 13}) {  // ranks without a sample, and uneven last batches
      DistributedEvalSampler share(count);
      Loader validation(Points{count}, {.batch_size = 4, .sampler = &share});
      int64_t seen = 0;
      trainer.validate_on(validation, [&](auto& net, const Example& batch) {
        EXPECT_FALSE(net.is_training());
        EXPECT_FALSE(at::GradMode::is_enabled());
        seen += batch.data.size(0);
        return StepOutput{.loss = loss_of(net, batch),
                          .metrics = {{"index", batch.data.select(1, 0).mean().template item<double>()}}};
      });
      const auto metrics = trainer.validate();
      EXPECT_EQ(seen, share.size()) << "rank " << rank;
      model.eval();
      std::vector<int64_t> indices;
      for (int64_t i = 0; i < count; ++i) indices.push_back(i);
      torch::NoGradGuard no_grad;
      const auto loss = loss_of(*model.module, Points{count}.get_batch(indices)).item<double>();
      model.train();
      EXPECT_NEAR(metrics.at("validation/loss"), loss, 1e-12) << count;
      EXPECT_NEAR(metrics.at("validation/index"), static_cast<double>(count - 1) / 2, 1e-12) << count;
    }
    EXPECT_TRUE(model.is_training());
  });
}

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

TEST(Trainer, StepsBehindTheLogsLastLineAreLoggedAtTheEnd) {
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

TEST(Trainer, RefusesWhatMakesNoSense) {
  testing::run_ranks(2, [](int) {
    auto world = init_process_group();
    auto net = std::make_shared<SmallNet>();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    lr_scheduler::ReduceLROnPlateau plateau(optimizer);
    Loader loader(Points{6}, {.batch_size = 2});
    EXPECT_THAT(message_of<c10::Error>([&] { Trainer(*net, optimizer, loader, loss_of); }),
                HasSubstr("wrap it in a lockstep::DistributedDataParallel"));
    DistributedDataParallel model(net);
    const auto refused = [&](TrainerOptions options) {
      options.progress_bar = false;
      return message_of<c10::Error>([&] { Trainer(model, optimizer, loader, loss_of, options).train(); });
    };
    EXPECT_THAT(refused({.accumulate_grad_batches = 0}), HasSubstr("accumulate_grad_batches is 0"));
    EXPECT_THAT(refused({.scheduler = &plateau, .scheduler_interval = TrainerOptions::Interval::step}),
                HasSubstr("once an epoch"));
    EXPECT_THAT(
        refused({.scheduler = &plateau}),
        HasSubstr("ReduceLROnPlateau looks at 'validation/loss', but the epoch's metrics are epoch/loss"));
    EXPECT_THAT(refused({.early_stopping = EarlyStoppingOptions{.monitor = "epoch/lost"}}),
                HasSubstr("early_stopping looks at 'epoch/lost'"));
    EXPECT_THAT(refused({.early_stopping = EarlyStoppingOptions{.patience = 0}}), HasSubstr("patience is 0"));
  });
}

TEST(EarlyStopping, WaitsAsLongAsItIsPatient) {
  const auto stops_at = [](const EarlyStoppingOptions& options, const std::vector<double>& values) {
    EarlyStopping stopping(options);
    for (size_t i = 0; i < values.size(); ++i) {
      EarlyStopping resumed(options);
      resumed.load_state_dict(stopping.state_dict());
      const bool stopped = stopping.update(values[i]);
      EXPECT_EQ(resumed.update(values[i]), stopped);
      if (stopped) return static_cast<int>(i);
    }
    return -1;
  };
  EXPECT_EQ(stops_at({.patience = 2}, {3, 2, 2, 1, 1, 1, 0}), 5);
  EXPECT_EQ(stops_at({.min_delta = 0.5, .patience = 2}, {3, 2.6, 2.5, 2.4}), 2)
      << "by exactly min_delta is none";
  EXPECT_EQ(stops_at({.patience = 2, .mode = MetricMode::max}, {1, 2, 1, 3, 3, 3}), 5);
  EXPECT_EQ(stops_at({.patience = 1}, {NAN}), 0);
  EXPECT_EQ(stops_at({.patience = 3}, {1, 2, 2}), -1);
}

// ---- Resuming

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

/// Three ranks have 5, 4 and 4 samples, so rank 0 alone has a third batch of two.
struct UnevenJob {
  UnevenJob(const std::filesystem::path& folder, int64_t stop_after)
      : trainer(model, optimizer, loader, LossOf{},
                {.max_epochs = 2,
                 .checkpoint = CheckpointManagerOptions{.directory = folder},
                 .progress_bar = false,
                 .callbacks = {{.after_step = [stop_after](TrainerCore& core) {
                   if (core.step() == stop_after) core.stop();
                 }}}}) {}

  struct LossOf {
    template <class Model>
    torch::Tensor operator()(Model& net, const Example& batch) const {
      return loss_of(net, batch);
    }
  };
  DistributedDataParallel<SmallNet> model{std::make_shared<SmallNet>(0.3)};
  torch::optim::Adam optimizer{model.parameters(), torch::optim::AdamOptions(0.01)};
  DistributedEvalSampler sampler{13};
  Loader loader{Points{13}, {.batch_size = 2, .sampler = &sampler, .num_workers = 1}};
  Trainer<DistributedDataParallel<SmallNet>, Loader, LossOf> trainer;
};

TEST(Trainer, RanksThatHaveRunOutStandInAfterAResume) {
  const SharedFolder folder;
  const auto body = [&](int rank) {
    auto world = init_process_group();
    const auto start = [&](int64_t stop_after, const std::string& name) {
      torch::manual_seed(50 + rank);
      auto job = std::make_unique<UnevenJob>(folder.path() / name, stop_after);
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
}  // namespace lockstep::trainer_test
