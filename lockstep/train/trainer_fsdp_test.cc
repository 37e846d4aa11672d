// A Trainer of a FullyShardedDataParallel against one of a DistributedDataParallel, and its checkpoints.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <gmock/gmock.h>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/model_state_dict.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/optim/lr_scheduler/decay.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/profiler/profiler.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/train/robust_loop.h>
#include <lockstep/train/testing/fixtures.h>
#include <lockstep/train/trainer.h>

namespace lockstep::trainer_fsdp_test {
namespace {

using data::DistributedSampler;
using testing::expect_close;
using testing::Loader;
using testing::loss_of;
using testing::message_of;
using testing::Points;
using testing::SharedFolder;
using testing::SmallNet;

constexpr int64_t kSamples = 25;  // ranks have unequal last batches

struct Trained {
  StateDict state;
  Metrics metrics;
};

TrainerOptions options_for(int64_t epochs, const std::optional<CheckpointManagerOptions>& checkpoint = {}) {
  return {.max_epochs = epochs,
          .accumulate_grad_batches = 2,
          .clip_grad_norm = 0.5,
          .checkpoint = checkpoint,
          .log_every_n_steps = 1,
          .progress_bar = false};
}

template <class Model, class Optimizer>
Trained train_with(Model& model, Optimizer& optimizer, const TrainerOptions& options) {
  DistributedSampler sampler(kSamples);
  Loader loader(Points{kSamples}, {.batch_size = 3, .sampler = &sampler});
  Loader validation(Points{7}, {.batch_size = 2});
  Trainer trainer(model, optimizer, loader, loss_of, options);
  trainer.validate_on(validation);
  trainer.restore();
  trainer.train();
  Metrics metrics = trainer.metrics();
  metrics.erase("train/samples_per_second");
  return {{}, metrics};
}

Trained train_sharded(const TrainerOptions& options, bool gather = false) {
  FullyShardedDataParallel model(
      std::make_shared<SmallNet>(),
      {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(9), .gather = gather});
  const auto optimizer = model.make_optimizer<torch::optim::Adam>(torch::optim::AdamOptions(0.01));
  Trained trained = train_with(model, *optimizer, options);
  trained.state = model.full_state_dict();
  return trained;
}

TEST(TrainerFsdp, TrainsAsDistributedDataParallel) {
  testing::run_ranks(3, [](int) {
    auto world = init_process_group();
    const auto net = std::make_shared<SmallNet>();
    DistributedDataParallel model(net);
    torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(0.01));
    const auto expected = train_with(model, optimizer, options_for(3));
    // Where parameters are gathered, all ranks take part in each forward, though they have unequally many batches.
    for (const bool gather : {false, true}) {
      const auto actual = train_sharded(options_for(3), gather);
      expect_close(actual.state, state_dict(net));
      ASSERT_EQ(actual.metrics.size(), expected.metrics.size());
      for (const auto& [name, value] : expected.metrics)
        EXPECT_NEAR(actual.metrics.at(name), value, 1e-9) << name;
    }
  });
}

TEST(TrainerFsdp, GoesOnFromItsCheckpointOnAnyNumberOfRanks) {
  const SharedFolder folder;
  const auto path = folder.path() / "run";
  const auto saved = [&](int64_t epochs) {
    return options_for(epochs, CheckpointManagerOptions{.directory = path, .every_epochs = 1});
  };
  const testing::RunRanksOptions options{.environment = folder.environment()};
  testing::run_ranks(
      3,
      [&](int) {
        auto world = init_process_group();
        (void)train_sharded(saved(2));
      },
      options);
  testing::run_ranks(
      2,
      [&](int) {
        auto world = init_process_group();
        const auto loaded = load_checkpoint(find_latest_checkpoint(path)->directory);
        const auto model = from_object<StateDict>(loaded.state.at("model"));
        for (const auto& [name, value] : train_sharded(saved(2)).state) {
          EXPECT_TRUE(at::equal(model.at(name).toTensor(), value.toTensor())) << name;
        }
      },
      options);
  testing::run_ranks(
      3,
      [&](int) {
        auto world = init_process_group();
        const auto through = train_sharded(options_for(4));
        // The other form goes on from the shared one's checkpoint, and saves its own.
        expect_close(train_sharded(saved(4), /*gather=*/true).state, through.state);
      },
      options);
}

// ---- A plain module, wrapped by the Trainer

/// Whole, on all ranks.
template <class AnyTrainer>
StateDict weights_of(const AnyTrainer& trainer) {
  return trainer.with_model([]<class Model>(Model& model) {
    if constexpr (ShardedModel<Model>) {
      return model.full_state_dict();
    } else {
      return state_dict(model);
    }
  });
}

/// Its first parameter has two names.
struct TiedNet : SmallNet {
  TiedNet() { register_parameter("again", parameters().front()); }
};

/// Steps of 12 samples, whatever the number of ranks is.
template <class Net = SmallNet>
Trained train_by(Strategy strategy, int64_t epochs, const std::optional<std::filesystem::path>& path = {}) {
  const int ranks = is_initialized() ? get_world_size() : 1;
  const data::DistributedSamplerOptions sampling{.num_replicas = ranks, .rank = ranks > 1 ? get_rank() : 0};
  DistributedSampler sampler(24, sampling);
  Loader loader(Points{24}, {.batch_size = 12 / ranks, .sampler = &sampler});
  Loader validation(Points{7}, {.batch_size = 2});
  TrainerOptions options = options_for(epochs);
  options.strategy = strategy;
  options.fsdp.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(9);
  options.accumulate_grad_batches = 1;
  options.scheduler = [](torch::optim::Optimizer& optimizer) {
    return std::make_shared<lr_scheduler::StepLR>(optimizer, /*step_size=*/1, /*gamma=*/0.5);
  };
  if (path) options.checkpoint = CheckpointManagerOptions{.directory = *path, .every_epochs = 1};
  Trainer trainer(std::make_shared<Net>(), torch::optim::AdamWOptions(0.01), loader, loss_of, options);
  trainer.validate_on(validation);
  trainer.restore();
  trainer.train();
  Metrics metrics = trainer.metrics();
  metrics.erase("train/samples_per_second");
  return {weights_of(trainer), metrics};
}

TEST(TrainerFsdp, AStrategyWrapsAPlainModule) {
  // Without a group.
  const Trained alone = train_by(Strategy::ddp, 3), tied_alone = train_by<TiedNet>(Strategy::ddp, 3);
  testing::run_ranks(3, [&](int) {
    auto world = init_process_group();
    for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp}) {
      const Trained trained = train_by(strategy, 3);
      expect_close(trained.state, alone.state);
      expect_close(train_by<TiedNet>(strategy, 3).state, tied_alone.state);
      ASSERT_EQ(trained.metrics.size(), alone.metrics.size());
      for (const auto& [name, value] : alone.metrics)
        EXPECT_NEAR(trained.metrics.at(name), value, 1e-9) << name;
    }
    DistributedSampler sampler(kSamples);
    Loader loader(Points{kSamples}, {.batch_size = 3, .sampler = &sampler});
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  Trainer trainer(std::shared_ptr<SmallNet>(), torch::optim::SGDOptions(0.1), loader, loss_of,
                                  options_for(1));
                }),
                ::testing::HasSubstr("the module is empty"));
  });
}

TEST(TrainerFsdp, StrategiesTakeEachOthersCheckpointsOnAnyNumberOfRanks) {
  constexpr int64_t kSaved = 2, kEpochs = 4;
  const StateDict undisturbed = train_by(Strategy::ddp, kEpochs).state;
  for (const auto& [saving, loading] :
       {std::pair(Strategy::ddp, Strategy::fsdp), std::pair(Strategy::fsdp, Strategy::ddp),
        std::pair(Strategy::fsdp, Strategy::fsdp)}) {
    const SharedFolder folder;
    const testing::RunRanksOptions options{.environment = folder.environment()};
    const auto path = folder.path() / "run";
    testing::run_ranks(
        2,
        [&](int) {
          auto world = init_process_group();
          (void)train_by(saving, kSaved, path);
        },
        options);
    for (const int ranks : {1, 3, 4}) {
      testing::run_ranks(
          ranks,
          [&](int rank) {
            auto world = init_process_group();
            const auto own = folder.path() / ("run on " + std::to_string(ranks));
            if (rank == 0) std::filesystem::copy(path, own, std::filesystem::copy_options::recursive);
            barrier();
            expect_close(train_by(loading, kEpochs, own).state, undisturbed);
          },
          options);
    }
  }
}

/// Both look at operators by observers.
TEST(TrainerFsdp, GathersUnderARunningProfiler) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto train = [&](bool profiled) {
      torch::manual_seed(1);
      FullyShardedDataParallel model(std::make_shared<SmallNet>(),
                                     {.auto_wrap_policy = fsdp::module_wrap_policy<torch::nn::LinearImpl>(),
                                      .gather = true,
                                      .forward_prefetch = true});
      const auto optimizer = model.make_optimizer<torch::optim::Adam>(torch::optim::AdamOptions(0.01));
      std::optional<Profiler> profiler;
      for (int step = 0; step < 4; ++step) {
        // It begins and ends between steps, and within one.
        if (profiled && step == 1) {
          profiler.emplace(ProfilerOptions{.record_shapes = true, .profile_memory = true});
        }
        optimizer->zero_grad();
        const auto loss =
            model(testing::random({3, 4}, static_cast<uint64_t>(2 * step + rank))).square().mean();
        if (profiled && step == 3) profiler->stop();
        loss.backward();
        optimizer->step();
      }
      if (profiled) {
        const auto& events = profiler->events();
        const auto count = [&](const std::string& name) {
          return std::ranges::count(events, name, &profiler::FunctionEvent::name);
        };
        EXPECT_EQ(count("aten::addmm"), 6) << "two layers, three forwards";
        EXPECT_EQ(count("FullyShardedDataParallel.forward"), 3);
        EXPECT_GE(count("aten::t"), 6) << "what is given the weights first";
        EXPECT_GT(count("aten::mm"), 0) << "of backward";
      }
      return model.full_state_dict();
    };
    const StateDict plain = train(false), profiled = train(true);
    for (const auto& [name, value] : plain) {
      EXPECT_TRUE(at::equal(value.toTensor(), profiled.at(name).toTensor())) << name;
    }
  });
}

TEST(TrainerFsdp, RobustLoopSavesNothingAfterAFailure) {
  for (const bool dies : {false, true}) {
    for (const int failing : {0, 1}) {
      const SharedFolder folder;
      const auto path = folder.path() / "run";
      const auto outcomes = testing::run_ranks_collect(
          2,
          [&](int rank) {
            auto world = init_process_group();
            FullyShardedDataParallel model(std::make_shared<SmallNet>());
            const auto optimizer = model.make_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.01));
            Loader loader(Points{24}, {.batch_size = 2});
            auto options =
                options_for(2, CheckpointManagerOptions{.directory = path, .every_steps = 2, .async = false});
            options.callbacks = {{.before_step = [&](TrainerCore& core) {
              if (rank != failing || core.step() != 3) return;
              if (dies) testing::die();
              TORCH_CHECK(false, "a bad sample");
            }}};
            Trainer trainer(model, *optimizer, loader, loss_of, options);
            RobustLoop(trainer).run();
          },
          {.expected_failures = {0, 1}, .environment = folder.environment()});
      if (outcomes[0].pid == 0) continue;  // within a rank
      const auto& survivor = outcomes[static_cast<size_t>(1 - failing)];
      EXPECT_EQ(survivor.exit_status.value_or(-1), 1);
      EXPECT_THAT(survivor.exception.value_or(""), ::testing::HasSubstr("rank " + std::to_string(failing)));
      EXPECT_THAT(survivor.output, ::testing::HasSubstr("no emergency checkpoint: the model is sharded"));
      const auto found = find_latest_checkpoint(path);
      ASSERT_TRUE(found.has_value());
      EXPECT_EQ(found->step, 2);
      EXPECT_EQ(found->emergency, "");
    }
  }
}

TEST(TrainerFsdp, AStepThatIsDoneAgainHasNoGradientsOfTheFailedOne) {
  testing::run_ranks(2, [](int) {
    auto world = init_process_group();
    const auto train = [](bool fails) {
      FullyShardedDataParallel model(std::make_shared<SmallNet>());
      const auto optimizer = model.make_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.01));
      Loader loader(Points{24}, {.batch_size = 3});
      int micro_batches = 0;
      const auto loss = [&](auto& of, const auto& batch) {
        ++micro_batches;
        TORCH_CHECK(!fails || micro_batches != 4, "the second step's second micro-batch");
        return loss_of(of, batch);
      };
      Trainer trainer(model, *optimizer, loader, loss, options_for(1));
      int failures = 0;
      trainer.recover = [&](const std::exception_ptr&) { ++failures; };
      trainer.train();
      EXPECT_EQ(failures, fails ? 1 : 0);
      return model.full_state_dict();
    };
    expect_close(train(true), train(false));
  });
}

TEST(TrainerFsdp, CantGoOnInAnotherGroup) {
  testing::run_ranks(2, [](int) {
    auto world = init_process_group();
    FullyShardedDataParallel model(std::make_shared<SmallNet>());
    const auto optimizer = model.make_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.01));
    Loader loader(Points{8}, {.batch_size = 2});
    Trainer trainer(model, *optimizer, loader, loss_of, options_for(1));
    EXPECT_THAT(message_of<c10::Error>([&] { trainer.update_process_group(new_group()); }),
                ::testing::HasSubstr("start again from a checkpoint"));
  });
}

}  // namespace
}  // namespace lockstep::trainer_fsdp_test
