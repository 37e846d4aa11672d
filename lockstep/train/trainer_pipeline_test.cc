// A Trainer of a pipeline against one of the whole model in one process, and its checkpoints.
#include <cstdint>
#include <filesystem>
#include <gmock/gmock.h>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/model_state_dict.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/optim/lr_scheduler/decay.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/mesh/device_mesh.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/train/robust_loop.h>
#include <lockstep/train/testing/fixtures.h>
#include <lockstep/train/trainer.h>

namespace lockstep::trainer_pipeline_test {
namespace {

namespace nn = torch::nn;
using data::DistributedSampler;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Loader;
using testing::message_of;
using testing::Points;
using testing::run_ranks;
using testing::SharedFolder;

constexpr int64_t kSamples = 26;  // the last batches are smaller

/// How the ranks share the model and the data.
struct Form {
  Strategy strategy = Strategy::ddp;
  std::vector<int64_t> balance = {};
  PipelineSchedule schedule = PipelineSchedule::k1F1B;
  int64_t pipelines = 1;
  bool gives_stages = false;
};

/// Does not see the samples' numbers. Its first and last layers are one.
nn::Sequential make_model(at::ScalarType type = at::kDouble) {
  torch::manual_seed(3);
  nn::Linear shared(3, 3);
  nn::Sequential model(nn::Functional([type](const at::Tensor& x) { return x.slice(1, 1).to(type); }), shared,
                       nn::Tanh(), nn::Linear(3, 8), nn::Tanh(), nn::Linear(8, 3), shared, nn::Linear(3, 1));
  model->to(type);
  return model;
}

const auto loss_and_error = [](auto& model, const data::Example& batch) {
  const at::Tensor output = model.forward(batch.data);
  return StepOutput{.loss = nn::functional::mse_loss(output, batch.target.to(output.scalar_type())),
                    .metrics = {{"error", (output - batch.target).abs().mean().template item<double>()}}};
};

struct Trained {
  StateDict state;  // this rank's
  Metrics metrics;
  int64_t epochs = 0;
};

template <class AnyTrainer>
StateDict weights_of(const AnyTrainer& trainer) {
  return trainer.with_model([]<class Model>(Model& model) -> StateDict {
    StateDict state;
    if constexpr (std::same_as<Model, PipelinedModel>) {
      for (const PipelineStage& stage : model.stages()) {
        for (const auto& [name, value] : stage.named_parameters())
          state.emplace(name, value.detach().clone());
      }
    } else if constexpr (!ShardedModel<Model>) {
      for (const auto& [name, value] : state_dict(model)) state.emplace(name, value.toTensor().clone());
    }
    return state;
  });
}

/// The groups of several pipelines.
struct Place {
  explicit Place(const Form& form) {
    if (form.pipelines == 1) return;
    mesh.emplace(init_device_mesh("cpu", {form.pipelines, get_world_size() / form.pipelines}, {"dp", "pp"}));
    replica = mesh->get_local_rank("dp");
  }
  std::optional<DeviceMesh> mesh;
  int replica = 0;
};

TrainerOptions options_for(const Form& form, const Place& place, int64_t epochs) {
  TrainerOptions options{
      .strategy = form.strategy,
      .pipeline = {.schedule = form.schedule, .n_microbatches = 4, .balance = form.balance},
      .max_epochs = epochs,
      .accumulate_grad_batches = 2,
      .clip_grad_norm = 0.5,
      .log_every_n_steps = 1,
      .progress_bar = false};
  if (place.mesh) {
    options.pipeline.group = place.mesh->get_group("pp");
    options.pipeline.data_parallel_group = place.mesh->get_group("dp");
  }
  return options;
}

/// Calls `action` with a Trainer in that form. Steps are of 20 and 6 samples, whatever the form.
template <class Loss, class Action>
void with_trainer(const Form& form, const Place& place, const TrainerOptions& options, const Loss& loss,
                  const Action& action, at::ScalarType type = at::kDouble) {
  const bool is_ddp = form.strategy == Strategy::ddp;
  const int replicas = !is_ddp ? static_cast<int>(form.pipelines) : is_initialized() ? get_world_size() : 1;
  const int replica = !is_ddp ? place.replica : is_initialized() ? get_rank() : 0;
  DistributedSampler sampler(kSamples, {.num_replicas = replicas, .rank = replica});
  Loader loader(Points{kSamples}, {.batch_size = 10 / replicas, .sampler = &sampler});
  const nn::Sequential model = make_model(type);
  const torch::optim::AdamWOptions adam(0.01);
  if (form.gives_stages) {
    const auto stages = pipeline_stages(model, form.balance, options.pipeline.group);
    Trainer trainer(stages, adam, loader, loss, options);
    action(trainer);
  } else {
    Trainer trainer(model, adam, loader, loss, options);
    action(trainer);
  }
}

Trained train(const Form& form, int64_t epochs, const std::optional<std::filesystem::path>& path = {}) {
  const Place place(form);
  TrainerOptions options = options_for(form, place, epochs);
  options.scheduler = [](torch::optim::Optimizer& optimizer) {
    return std::make_shared<lr_scheduler::StepLR>(optimizer, /*step_size=*/1, /*gamma=*/0.5);
  };
  options.early_stopping = EarlyStoppingOptions{.min_delta = 10, .patience = 2};  // never good enough
  if (path) options.checkpoint = CheckpointManagerOptions{.directory = *path, .every_epochs = 1};
  Loader validation(Points{7}, {.batch_size = 2});
  Trained trained;
  with_trainer(form, place, options, loss_and_error, [&](auto& trainer) {
    trainer.validate_on(validation);
    trainer.restore();
    trainer.train();
    trained = {weights_of(trainer), trainer.metrics(), trainer.epoch()};
    trained.metrics.erase("train/samples_per_second");
    EXPECT_TRUE(!is_initialized() || trainer.step_loss() > 0);
  });
  return trained;
}

void expect_close(const StateDict& actual, const StateDict& expected, double tolerance = 1e-10) {
  for (const auto& [name, value] : actual) {
    EXPECT_LT(testing::difference(value.toTensor(), expected.at(name).toTensor()), tolerance) << name;
  }
}

/// Up to the gradients' norm in float, as a rank has it whose stage has no parameters.
void expect_same_metrics(const Metrics& actual, const Metrics& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, value] : expected) EXPECT_NEAR(actual.at(name), value, 1e-7) << name;
}

const Form kAlone{}, kTwoStages{.strategy = Strategy::pipeline, .balance = {3, 5}},
    kTwoByTwo{.strategy = Strategy::pipeline,
              .balance = {4, 4},
              .schedule = PipelineSchedule::kGPipe,
              .pipelines = 2},
    kInterleaved{.strategy = Strategy::pipeline,
                 .balance = {2, 2, 2, 2},
                 .schedule = PipelineSchedule::kInterleavedZeroBubble,
                 .gives_stages = true},
    kThreeStages{.strategy = Strategy::pipeline,
                 .balance = {1, 4, 3},  // none of the first stage's is a parameter
                 .gives_stages = true};

TEST(TrainerPipeline, TrainsAsOneProcess) {
  const Trained alone = train(kAlone, 6);
  EXPECT_EQ(alone.epochs, 3);  // by early stopping
  for (const auto& [ranks, form] :
       {std::pair(2, kTwoStages), std::pair(4, kTwoByTwo), std::pair(2, kInterleaved)}) {
    run_ranks(ranks, [&, &form = form](int) {
      auto world = init_process_group();
      const Trained trained = train(form, 6);
      EXPECT_FALSE(trained.state.empty());
      expect_close(trained.state, alone.state);
      expect_same_metrics(trained.metrics, alone.metrics);
      EXPECT_EQ(trained.epochs, alone.epochs);
    });
  }
}

TEST(TrainerPipeline, FormsTakeEachOthersCheckpoints) {
  const Trained undisturbed = train(kAlone, 2);
  const std::vector<std::pair<int, Form>> forms{
      {2, kAlone}, {2, kTwoStages}, {4, kTwoByTwo}, {3, kThreeStages}};
  for (size_t saving = 0; saving < forms.size(); ++saving) {
    const SharedFolder folder;
    const testing::RunRanksOptions options{.environment = folder.environment()};
    const auto path = folder.path() / "run";
    run_ranks(
        forms[saving].first,
        [&](int) {
          auto world = init_process_group();
          (void)train(forms[saving].second, 1, path);
        },
        options);
    const auto& [ranks, form] = forms[(saving + 1) % forms.size()];
    run_ranks(
        ranks,
        [&, &form = form](int) {
          auto world = init_process_group();
          const Trained trained = train(form, 2, path);
          expect_close(trained.state, undisturbed.state);
          expect_same_metrics(trained.metrics, undisturbed.metrics);
        },
        options);
  }
}

TEST(TrainerPipeline, GoesOnAfterARankWasKilled) {
  constexpr int64_t kKilledAt = 3,
                    kEpochs = 2;  // within the second epoch, of two steps and a rest each
  const SharedFolder folder;
  const auto path = folder.path() / "run";
  const auto train_robustly = [&](bool saves, const TrainerCallbacks& callbacks) {
    const Place place(kTwoByTwo);
    TrainerOptions options = options_for(kTwoByTwo, place, kEpochs);
    options.callbacks = {callbacks};
    StateDict state;
    if (saves) {
      options.checkpoint =
          CheckpointManagerOptions{.directory = path, .every_steps = 1, .keep_last = 1, .async = false};
    }
    with_trainer(kTwoByTwo, place, options, testing::loss_of, [&](auto& trainer) {
      if (saves) {
        EXPECT_EQ(RobustLoop(trainer).run(), 0);
      } else {
        trainer.train();
      }
      state = weights_of(trainer);
    });
    return state;
  };
  const auto outcomes =
      testing::run_ranks_collect(4,
                                 [&](int rank) {
                                   auto world = init_process_group();
                                   (void)train_robustly(true, {.before_step = [&](TrainerCore& core) {
                                                          if (rank == 1 && core.step() == kKilledAt)
                                                            testing::die();
                                                        }});
                                 },
                                 {.expected_failures = {0, 1, 2, 3}, .environment = folder.environment()});
  if (outcomes[0].pid != 0) {  // not within a rank
    for (const size_t survivor : {0, 2, 3}) {
      EXPECT_EQ(outcomes[survivor].exit_status.value_or(-1), 1);
      EXPECT_THAT(outcomes[survivor].exception.value_or(""), HasSubstr("rank 1")) << survivor;
    }
    const auto found = find_latest_checkpoint(path);
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->step, kKilledAt);
    EXPECT_EQ(found->emergency, "");
  }
  run_ranks(4,
            [&](int) {
              auto world = init_process_group();
              const StateDict expected = train_robustly(false, {});
              testing::expect_equal(train_robustly(true, {}), expected);
            },
            {.environment = folder.environment()});
}

TEST(TrainerPipeline, StagesSkipTheSameStepsOfAGradScaler) {
  const auto train_in_half = [](const Form& form, double& scale) {
    const Place place(form);
    TrainerOptions options = options_for(form, place, 2);
    options.pipeline.n_microbatches = 1;  // rounding goes by the micro-batch
    options.autocast_dtype = at::kHalf;
    options.scaler = {.init_scale = 0x1p24, .growth_interval = 2};
    StateDict state;
    const auto loss = [](auto& model, const data::Example& batch) {
      const at::Tensor output = model.forward(batch.data);
      return nn::functional::mse_loss(output.to(at::kFloat), batch.target.to(at::kFloat));
    };
    with_trainer(
        form, place, options, loss,
        [&](auto& trainer) {
          trainer.train();
          state = weights_of(trainer);
          const auto scaler = from_object<StateDict>(trainer.state().state_dict().at("scaler"));
          scale = scaler.at("scale").toDouble();
        },
        at::kFloat);
    return state;
  };
  double scale_alone = 0;
  const StateDict alone = train_in_half(kAlone, scale_alone);
  EXPECT_LT(scale_alone, 0x1p24);
  run_ranks(2, [&](int) {
    auto world = init_process_group();
    double scale = 0;
    expect_close(train_in_half(kTwoStages, scale), alone, 1e-5);
    EXPECT_EQ(scale, scale_alone);
  });
}

/// Layers of torch's that draw random numbers. `group`: of all ranks that train.
StateDict train_with_dropout(const std::vector<int64_t>& balance, const ProcessGroup& group, int64_t epochs,
                             const std::optional<std::filesystem::path>& path = {}) {
  torch::manual_seed(5);
  nn::Sequential model(nn::Functional([](const at::Tensor& x) { return x.slice(1, 1); }), nn::Linear(3, 8),
                       nn::Dropout(0.3), nn::Linear(8, 8), nn::Dropout(0.3), nn::Tanh(), nn::Linear(8, 1));
  model->to(at::kDouble);
  TrainerOptions options{.strategy = Strategy::pipeline,
                         .pipeline = {.n_microbatches = 4, .balance = balance, .seed = 17},
                         .max_epochs = epochs,
                         .accumulate_grad_batches = 2,
                         .progress_bar = false,
                         .process_group = group};
  if (path) options.checkpoint = CheckpointManagerOptions{.directory = *path, .every_epochs = 1};
  DistributedSampler sampler(kSamples, {.num_replicas = 1, .rank = 0});
  Loader loader(Points{kSamples}, {.batch_size = 8, .sampler = &sampler});
  torch::manual_seed(get_rank());  // of no effect
  Trainer trainer(model.ptr(), torch::optim::AdamWOptions(0.01), loader, testing::loss_of, options);
  // Three stages go on from what two have saved after the first epoch.
  EXPECT_EQ(trainer.restore().has_value(), path.has_value() && epochs == 2);
  trainer.train();
  return weights_of(trainer);
}

TEST(TrainerPipeline, DropoutDependsOnNoSplitAndGoesOnFromACheckpoint) {
  const SharedFolder folder;
  for (const auto& [ranks, balance, epochs] :
       {std::tuple(2, std::vector<int64_t>{4, 3}, 1), std::tuple(3, std::vector<int64_t>{2, 3, 2}, 2)}) {
    run_ranks(ranks,
              [&, &balance = balance, &epochs = epochs](int) {
                auto world = init_process_group();
                const auto [alone, all_alone] = new_subgroups(1);
                const StateDict whole = train_with_dropout({7}, alone, epochs);
                const auto expect_same = [&whole](const StateDict& actual) {
                  EXPECT_FALSE(actual.empty());
                  for (const auto& [name, value] : actual)
                    EXPECT_TRUE(at::equal(value.toTensor(), whole.at(name).toTensor())) << name;
                };
                expect_same(train_with_dropout(balance, {}, epochs));
                expect_same(train_with_dropout(balance, {}, epochs, folder.path() / "run"));
              },
              {.environment = folder.environment()});
  }
}

TEST(TrainerPipeline, ValidatesOnOutputsThatDontFitTogether) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    int64_t calls = 0;
    const auto some_columns = [&](const at::Tensor& x) { return x.narrow(1, 0, 1 + calls++ % 2); };
    nn::Sequential model(nn::Linear(4, 4), nn::Functional(some_columns));
    model->to(at::kDouble);
    Loader loader(Points{8}, {.batch_size = 4}), validation(Points{8}, {.batch_size = 4});
    const auto loss = [](auto& net, const data::Example& batch) {
      return net.forward(batch.data).square().mean();
    };
    Trainer trainer(model.ptr(), torch::optim::SGDOptions(0.1), loader, loss,
                    {.strategy = Strategy::pipeline,
                     .pipeline = {.n_microbatches = 2, .balance = {1, 1}},
                     .max_epochs = 1,
                     .progress_bar = false});
    trainer.validate_on(validation);
    trainer.train();
    EXPECT_TRUE(trainer.metrics().contains("validation/loss"));
  });
}

/// Its first two batches of three are exchanged.
struct Exchanged : Points {
  data::Example get_batch(std::span<const int64_t> indices) const {
    std::vector<int64_t> others(indices.begin(), indices.end());
    for (int64_t& index : others) index = index < 6 ? (index + 3) % 6 : index;
    return Points::get_batch(others);
  }
  data::Example get(int64_t index) const { return get_batch({&index, 1}); }
};

TEST(TrainerPipeline, RefusesTheBatchesOfAStepInAnotherOrder) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const TrainerOptions options{.strategy = Strategy::pipeline,
                                 .pipeline = {.n_microbatches = 2, .balance = {3, 5}},
                                 .accumulate_grad_batches = 2,
                                 .progress_bar = false};
    const auto refuse = [&](auto loader) {
      Trainer trainer(make_model().ptr(), torch::optim::SGDOptions(0.1), loader, testing::loss_of, options);
      EXPECT_THAT(message_of<c10::ValueError>([&] { trainer.train(); }),
                  HasSubstr("are of one pipeline and have different batches"));
    };
    if (rank == 0) {
      refuse(Loader(Points{12}, {.batch_size = 3}));
    } else {
      refuse(data::DataLoader<Exchanged>(Exchanged{{12}}, {.batch_size = 3}));
    }
  });
}

TEST(TrainerPipeline, RefusesWhatItCantTrain) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto model = make_model();
    const torch::optim::SGDOptions sgd(0.1);
    TrainerOptions options{.strategy = Strategy::pipeline,
                           .pipeline = {.n_microbatches = 2, .balance = {3, 5}},
                           .progress_bar = false};
    DistributedSampler of_ranks(12);
    Loader parts(Points{12}, {.batch_size = 3, .sampler = &of_ranks}), all(Points{12}, {.batch_size = 3});
    const auto refuse = [&](auto of, auto& loader, const auto& loss, const auto& text) {
      EXPECT_THAT(message_of<c10::ValueError>([&] {
                    Trainer trainer(of, sgd, loader, loss, options);
                    trainer.train();
                  }),
                  text);
    };
    refuse(model.ptr(), parts, testing::loss_of,
           AllOf(HasSubstr("ranks 0 and 1 are of one pipeline and have different batches"),
                 HasSubstr("(here 1 and 0)")));
    refuse(std::make_shared<testing::SmallNet>(), all, testing::loss_of,
           HasSubstr("only a torch::nn::Sequential"));
    const auto stages = pipeline_stages(model, {3, 5});
    options.strategy = Strategy::fsdp;
    refuse(stages, all, testing::loss_of, HasSubstr("set strategy to Strategy::pipeline"));
    options.strategy = Strategy::pipeline;
    options.pipeline.balance = {3, 4};
    refuse(model.ptr(), all, testing::loss_of, HasSubstr("add up to the module's 8; these add up to 7"));
    options.pipeline.balance = {3, 5};
    refuse(rank == 0 ? stages : std::vector<PipelineStage>(), all, testing::loss_of,
           HasSubstr("rank 1 has no stage"));
    options.pipeline.data_parallel_group = new_group();
    refuse(model.ptr(), all, testing::loss_of, HasSubstr("2 pipelines of 2 ranks are 4 ranks"));
    options.pipeline.data_parallel_group.reset();

    Trainer trainer(stages, sgd, all, testing::loss_of, options);
    EXPECT_THAT(message_of<c10::Error>([&] { trainer.update_process_group(new_group()); }),
                HasSubstr("a pipeline can't go on in another group"));
    // Last, for it ends the pipeline's group.
    const auto loss_of_half = [](auto& net, const data::Example& batch) {
      return nn::functional::mse_loss(net.forward(batch.data / 2), batch.target);
    };
    Trainer changes_inputs(model.ptr(), sgd, all, loss_of_half, options);
    if (rank == 1) {
      EXPECT_THAT(message_of<c10::ValueError>([&] { changes_inputs.train(); }),
                  HasSubstr("other tensors than the batch's inputs"));
    } else {
      EXPECT_THAT(message_of<c10::DistBackendError>([&] { changes_inputs.train(); }),
                  HasSubstr("other tensors than the batch's inputs"));
    }
  });
}

TEST(TrainerPipeline, AStageIsNotFullySharded) {
  using Sharded = FullyShardedDataParallel<nn::LinearImpl>;
  struct Holds : nn::Module {
    explicit Holds(const std::shared_ptr<Sharded>& wrapped) : layer(register_module("layer", wrapped)) {}
    torch::Tensor forward(const torch::Tensor& x) { return layer->forward(x); }
    std::shared_ptr<Sharded> layer;
  };
  run_ranks(1, [](int) {
    auto world = init_process_group();
    const auto wrapped = std::make_shared<Sharded>(nn::Linear(2, 2));
    const auto text = HasSubstr("is wrapped for data parallelism");
    EXPECT_THAT(message_of<c10::ValueError>([&] { PipelineStage(wrapped, 0, 1); }), text);
    const auto holds = std::make_shared<Holds>(wrapped);
    EXPECT_THAT(message_of<c10::ValueError>([&] { PipelineStage(holds, 0, 1); }), text);
  });
}

}  // namespace
}  // namespace lockstep::trainer_pipeline_test
