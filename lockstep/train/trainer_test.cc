// The Trainer against loops written by hand.
#include <algorithm>
#include <concepts>
#include <cstdint>
#include <gmock/gmock.h>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/optim/lr_scheduler.h>
#include <lockstep/parallel/ddp/gradient_accumulation.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/train/testing/fixtures.h>
#include <lockstep/train/trainer.h>

namespace lockstep::trainer_test {
namespace {

using data::DistributedEvalSampler;
using data::DistributedSampler;
using data::Example;
using testing::copies;
using testing::equal;
using ::testing::HasSubstr;
using testing::Loader;
using testing::loss_of;
using testing::message_of;
using testing::Points;
using testing::SmallNet;

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

TEST(Trainer, ClippingByNormLeavesIgnoredParametersOut) {
  testing::run_ranks(2, [](int) {
    auto world = init_process_group();
    auto net = std::make_shared<SmallNet>();
    DistributedDataParallel model(net, {.parameters_to_ignore = {"hidden.weight"}});
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    DistributedSampler sampler(12);
    Loader loader(Points{12}, {.batch_size = 2, .sampler = &sampler});
    Trainer trainer(model, optimizer, loader, loss_of,
                    {.max_epochs = 1, .clip_grad_norm = 0.01, .progress_bar = false});
    trainer.train();
    EXPECT_FALSE(testing::same_everywhere(net->hidden->weight.detach()));
    EXPECT_TRUE(testing::same_everywhere(net->hidden->bias.detach()));
    EXPECT_TRUE(testing::same_everywhere(net->output->weight.detach()));
  });
}

TEST(Trainer, ValidationLeavesIgnoredBuffersAlone) {
  struct Buffered : SmallNet {
    torch::Tensor own = register_buffer("own", torch::full({1}, get_rank()));
    torch::Tensor shared = register_buffer("shared", torch::zeros({1}));
  };
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<Buffered>();
    DistributedDataParallel model(net, {.parameters_to_ignore = {"own"}});
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    DistributedSampler sampler(4);
    Loader loader(Points{4}, {.batch_size = 2, .sampler = &sampler});
    Trainer trainer(model, optimizer, loader, loss_of, {.max_epochs = 1, .progress_bar = false});
    trainer.validate_on(loader);
    net->shared.fill_(rank + 3);
    trainer.validate();
    EXPECT_EQ(net->own.item<double>(), rank);
    EXPECT_EQ(net->shared.item<double>(), 3) << "rank 0's";
  });
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

/// SmallNet in a holder, as LibTorch's tutorials declare their modules.
TORCH_MODULE_IMPL(HeldNet, SmallNet);

/// The weights after an epoch. `with`: an optimizer, or the options of one.
template <class Given, class With>
std::vector<torch::Tensor> weights_after_epoch(Given& given, With& with, SmallNet& net) {
  Loader loader(Points{12}, {.batch_size = 3});
  Trainer trainer(given, with, loader, loss_of, {.progress_bar = false});
  trainer.train();
  EXPECT_EQ(trainer.step(), 4);
  return copies(net.parameters());
}

TEST(Trainer, TakesAModuleInAHolder) {
  const auto expected = [] {
    SmallNet net;
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    return weights_after_epoch(net, optimizer, net);
  }();
  const auto in_all_forms = [&] {
    const torch::optim::SGDOptions options(0.1);
    HeldNet held;
    EXPECT_TRUE(equal(weights_after_epoch(held, options, *held), expected));
    const HeldNet constant;
    EXPECT_TRUE(equal(weights_after_epoch(constant, options, *constant.ptr()), expected));
    auto shared = std::make_shared<SmallNet>();
    EXPECT_TRUE(equal(weights_after_epoch(shared, options, *shared), expected));
  };
  in_all_forms();  // without a group, where nothing is wrapped
  testing::run_ranks(2, [&](int) {
    auto world = init_process_group();
    in_all_forms();  // both ranks have the same batches
  });
}

TEST(Trainer, TakesAModuleInAHolderWithItsOptimizer) {
  SmallNet net;
  torch::optim::SGD plain(net.parameters(), 0.1);
  const auto expected = weights_after_epoch(net, plain, net);
  HeldNet held;
  torch::optim::SGD of_held(held->parameters(), 0.1);
  EXPECT_TRUE(equal(weights_after_epoch(held, of_held, *held), expected));
  auto shared = std::make_shared<SmallNet>();
  torch::optim::SGD of_shared(shared->parameters(), 0.1);
  EXPECT_TRUE(equal(weights_after_epoch(shared, of_shared, *shared), expected));

  Loader loader(Points{12}, {.batch_size = 3});
  std::shared_ptr<SmallNet> empty;
  HeldNet empty_holder(nullptr);
  for (const std::string& error : {
           message_of<c10::ValueError>([&] { Trainer(empty, plain, loader, loss_of); }),
           message_of<c10::ValueError>([&] { Trainer(empty_holder, plain, loader, loss_of); }),
           message_of<c10::ValueError>(
               [&] { Trainer(empty_holder, torch::optim::SGDOptions(0.1), loader, loss_of); }),
       }) {
    EXPECT_THAT(error, HasSubstr("the module is empty"));
  }
}

// What is no model is deduced to a class whose constructor says so in one line: NoModel's.
template <class Given>
using Deduced = decltype(Trainer(std::declval<Given&>(), torch::optim::SGDOptions(0.1),
                                 std::declval<Loader&>(), loss_of));
template <class Model>
using TrainerOf = Trainer<Model, Loader, std::remove_const_t<decltype(loss_of)>>;
static_assert(std::same_as<Deduced<HeldNet>, TrainerOf<StrategyModel<SmallNet>>>);
static_assert(std::same_as<Deduced<std::shared_ptr<SmallNet>>, TrainerOf<StrategyModel<SmallNet>>>);
static_assert(std::same_as<Deduced<std::vector<PipelineStage>>, TrainerOf<StrategyStages>>);
static_assert(std::same_as<Deduced<SmallNet>, TrainerOf<train::NoModel>>, "a module by value");
static_assert(std::same_as<Deduced<torch::nn::AnyModule>, TrainerOf<train::NoModel>>);
static_assert(std::same_as<Deduced<int>, TrainerOf<train::NoModel>>);

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

}  // namespace
}  // namespace lockstep::trainer_test
