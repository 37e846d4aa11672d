#include <cstdint>
#include <gmock/gmock.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/training_state.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/testing/tensors.h>

// The names in states of pipelines' stages: weights that are tied have several, and each weight has its own.
namespace lockstep::pipeline_state_names_test {
namespace {

using namespace pipeline_test;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

constexpr int64_t kMicroBatches = 4;

Batch batch_of(int64_t step) {
  return random_batch(static_cast<uint64_t>(2 * step), 9, at::kDouble);
}

/// Interleaved stages, of which the first and the third, on one rank, have a weight and a bias each that are tied.
struct TiedOnOneRank {
  TiedOnOneRank(int rank, const std::string& third, uint64_t seed) {
    torch::manual_seed(seed);
    Tensors parameters;
    for (int64_t index = rank; index < 4; index += 2) {
      nn::Linear layer(6, 6);
      layer->to(at::kDouble);
      nn::Sequential layers;
      std::string name = index == 2 ? third : std::to_string(index);
      layers->push_back(std::move(name), layer);
      PipelineStageOptions options;
      if (index % 2 == 0) options.tied = {{"weight", layer->weight}, {"bias", layer->bias}};
      stages.emplace_back(layers, index, 4, options);
      for (const at::Tensor& parameter : layer->parameters()) parameters.push_back(parameter);
    }
    optimizer = std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.01));
    runner = std::make_unique<PipelineRunner>(stages,
                                              PipelineOptions{.schedule = PipelineSchedule::kInterleaved1F1B,
                                                              .n_microbatches = kMicroBatches,
                                                              .loss_fn = mean_of_squares});
    state.add_model("model", stages);
    state.add_optimizer("optimizer", *optimizer, stages);
  }
  void step(int64_t number) {
    const Batch batch = batch_of(number);
    optimizer->zero_grad();
    runner->step({batch.data}, batch.target);
    optimizer->step();
  }

  std::vector<PipelineStage> stages;
  std::unique_ptr<torch::optim::Adam> optimizer;
  std::unique_ptr<PipelineRunner> runner;
  TrainingState state;
};

TEST(PipelineStateNames, TensorsThatARankTiesAreSavedOnceAndLoadedIntoEach) {
  for (const std::string third : {"0", "2"}) {  // one name for both, and another one
    const testing::SharedFolder folder;
    run_ranks(2,
              [&](int rank) {
                auto world = init_process_group();
                TiedOnOneRank saved(rank, third, 5), loaded(rank, third, 6);
                saved.step(0);
                save_checkpoint(folder.path() / "step", saved.state.state_dict(), {}, {.step = 1});
                loaded.state.load_state_dict(load_checkpoint(folder.path() / "step").state);
                const auto expect_same = [&] {
                  for (size_t i = 0; i < saved.stages.size(); ++i) {
                    EXPECT_TRUE(testing::equal(loaded.stages[i].parameters(), saved.stages[i].parameters()))
                        << i;
                  }
                };
                expect_same();
                saved.step(1);
                loaded.step(1);
                expect_same();
              },
              {.environment = folder.environment()});
  }
}

/// A layer whose weight others may have, too.
struct Product : nn::Module {
  explicit Product(const at::Tensor& of) : weight(register_parameter("weight", of)) {}
  at::Tensor forward(const at::Tensor& x) { return x.mm(weight); }
  at::Tensor weight;
};

/// Its names of the weight are not in the order in which the layers compute.
struct HeadFirst : nn::Module {
  explicit HeadFirst(const at::Tensor& weight) {
    register_module("head", std::make_shared<Product>(weight));
    register_module("embedding", std::make_shared<Product>(weight));
  }
};

TEST(PipelineStateNames, AWholeThatHasTheNamesOfATiedWeightInAnotherOrderLoadsThem) {
  const testing::SharedFolder folder;
  run_ranks(2,
            [&](int rank) {
              auto world = init_process_group();
              const auto path = folder.path() / "step";
              const auto own = testing::random({6, 6}, 3, at::kDouble),
                         other = testing::random({6, 6}, 4, at::kDouble);
              const auto average = [](const torch::optim::Adam& optimizer, const at::Tensor& weight) {
                const auto& state = *optimizer.state().at(weight.unsafeGetTensorImpl());
                return dynamic_cast<const torch::optim::AdamParamState&>(state).exp_avg();
              };
              const auto layer = std::make_shared<Product>(own);
              nn::Sequential layers;
              layers->push_back(rank == 0 ? "embedding" : "head", layer);
              const std::vector<PipelineStage> stages{
                  PipelineStage(layers, rank, 2, {.tied = {{"w", layer->weight}}})};
              torch::optim::Adam optimizer({layer->weight}, torch::optim::AdamOptions(0.01));
              PipelineRunner runner(stages, {.n_microbatches = kMicroBatches, .loss_fn = mean_of_squares});
              TrainingState state;
              state.add_model("model", stages);
              state.add_optimizer("optimizer", optimizer, stages);
              const Batch batch = batch_of(0);
              runner.step({batch.data}, batch.target);
              optimizer.step();
              save_checkpoint(path, state.state_dict(), {}, {.step = 1});

              const auto whole = std::make_shared<HeadFirst>(other);
              torch::optim::Adam of_whole({other}, torch::optim::AdamOptions(0.01));
              TrainingState whole_state;
              whole_state.add_model("model", *whole);
              whole_state.add_optimizer("optimizer", of_whole, *whole);
              whole_state.load_state_dict(load_checkpoint(path).state);
              EXPECT_TRUE(at::equal(other, layer->weight));
              EXPECT_TRUE(at::equal(average(of_whole, other), average(optimizer, layer->weight)));
            },
            {.environment = folder.environment()});
}

TEST(PipelineStateNames, RefusesNamesThatAreNotOfTheWhole) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    TrainingState state;
    const nn::Sequential layers(nn::Linear(3, 3));
    EXPECT_THAT(
        message_of<c10::ValueError>([&] { state.add_model("model", {PipelineStage(layers, rank, 2)}); }),
        AllOf(HasSubstr("the name '0.weight' is on stage 0 and on stage 1"), HasSubstr("push_back(name")));
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  const auto call = [](const at::Tensor& x) { return torch::tanh(x); };
                  const PipelineStageOptions options{.parameters = layers->parameters()};
                  state.add_model("model", {rank == 0 ? PipelineStage(layers, 0, 2)
                                                      : PipelineStage(call, 1, 2, options)});
                }),
                AllOf(HasSubstr("on rank 1"), HasSubstr("stage 1 is a function")));
    // The same name for a weight that is the same.
    const PipelineStageOptions tied{
        .tied = {{"weight", layers->parameters()[0]}, {"bias", layers->parameters()[1]}}};
    const std::vector<PipelineStage> stages{PipelineStage(layers, rank, 2, tied)};
    state.add_model("model", stages);
    torch::optim::LBFGS all_at_once(layers->parameters(), 1.0);
    EXPECT_THAT(message_of<c10::ValueError>([&] { state.add_optimizer("optimizer", all_at_once, stages); }),
                HasSubstr("LBFGS"));
    torch::optim::SGD foreign(Tensors{at::zeros({2}).requires_grad_()}, 0.1), own(layers->parameters(), 0.1);
    EXPECT_THAT(message_of<c10::ValueError>(
                    [&] { state.add_optimizer("optimizer", rank == 0 ? own : foreign, stages); }),
                AllOf(HasSubstr("on rank 1"), HasSubstr("is none of the model")));
    EXPECT_TRUE(state.is_collective());
  });
}

}  // namespace
}  // namespace lockstep::pipeline_state_names_test
