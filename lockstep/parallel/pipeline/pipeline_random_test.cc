#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/parallel/pipeline/pipeline_random.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// Random numbers of layers that know nothing of pipelines.
namespace lockstep::pipeline_random_test {
namespace {

using namespace pipeline_test;
using testing::run_ranks;

constexpr uint64_t kSeed = 92;
constexpr int64_t kLayers = 8, kFirstStep = 5, kSteps = 2, kMicroBatches = 4;

/// Draws in a checkpoint, which is computed again in backward.
struct CheckpointedDropout : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return activation_checkpoint(
        {}, [](const at::Tensor& y) { return torch::tanh(torch::dropout(y, 0.25, /*train=*/true)); }, x);
  }
};

nn::Sequential make_model() {
  torch::manual_seed(91);
  nn::Sequential model(nn::Linear(6, 8), nn::Dropout(0.5), nn::Tanh(), nn::Dropout(0.25), nn::Linear(8, 6),
                       std::make_shared<CheckpointedDropout>(), nn::Linear(6, 6), nn::Dropout(0.5));
  return model;
}

Batch batch() {
  return random_batch(93, 3 * kMicroBatches);
}

struct Results {
  Tensors outputs;  // of each step, where the last stage is
  std::map<std::string, at::Tensor> gradients;
};

Results train(const std::vector<int64_t>& balance, PipelineSchedule schedule, const ProcessGroup& group) {
  const auto stages = pipeline_stages(make_model(), balance, group);
  PipelineRunner pipeline(
      stages,
      {.schedule = schedule, .n_microbatches = kMicroBatches, .loss_fn = mean_of_squares, .seed = kSeed});
  pipeline.set_steps(kFirstStep);
  torch::manual_seed(get_rank());  // of no effect
  Results results;
  for (int64_t step = 0; step < kSteps; ++step) {
    const Tensors outputs = pipeline.step({batch().data}, batch().target);
    if (!outputs.empty()) results.outputs.push_back(outputs.front());
  }
  for (const PipelineStage& stage : stages) {
    for (const auto& [name, parameter] : stage.named_parameters()) {
      results.gradients.emplace(name, parameter.grad());
    }
  }
  return results;
}

void expect_same(const Results& actual, const Results& wanted) {
  if (!actual.outputs.empty()) {
    EXPECT_TRUE(testing::equal(actual.outputs, wanted.outputs));
  }
  for (const auto& [name, gradient] : actual.gradients) {
    EXPECT_TRUE(at::equal(gradient, wanted.gradients.at(name))) << name;
  }
}

TEST(Pipelines, DropoutOfAnyLayerDependsOnNoSplit) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [ranks](int /*rank*/) {
      auto world = init_process_group();
      const auto [alone, all_alone] = new_subgroups(1);
      const Results whole = train({kLayers}, PipelineSchedule::kGPipe, alone);
      ASSERT_EQ(whole.outputs.size(), static_cast<size_t>(kSteps));
      EXPECT_FALSE(at::equal(whole.outputs[0], whole.outputs[1]));  // the same batch, by two steps
      if (ranks == 2) {
        expect_same(train({3, 5}, PipelineSchedule::k1F1B, {}), whole);
        expect_same(train({6, 2}, PipelineSchedule::kGPipe, {}), whole);
        expect_same(train({2, 1, 4, 1}, PipelineSchedule::kInterleavedZeroBubble, {}), whole);
      } else {
        expect_same(train({1, 4, 3}, PipelineSchedule::k1F1B, {}), whole);
        expect_same(train({3, 3, 2}, PipelineSchedule::kGPipe, {}), whole);
      }
    });
  }
}

TEST(Pipelines, DropoutIsThatOfAScopeAndTheLayersNumber) {
  run_ranks(1, [](int /*rank*/) {
    auto world = init_process_group();
    const Results whole = train({kLayers}, PipelineSchedule::kGPipe, {});
    const nn::Sequential model = make_model();
    for (int64_t step = 0; step < kSteps; ++step) {
      Tensors parts;
      for (const at::Tensor& rows : at::tensor_split(batch().data, kMicroBatches)) {
        const PipelineRandomScope scope(kSeed, kFirstStep + step, static_cast<int64_t>(parts.size()));
        at::Tensor x = rows;
        int64_t number = 0;
        for (nn::AnyModule layer : *model) {
          seed_pipeline_layer(number++);
          x = layer.forward(x);
        }
        parts.push_back(x.detach());
      }
      EXPECT_TRUE(at::equal(whole.outputs.at(static_cast<size_t>(step)), at::cat(parts)));
    }
  });
}

}  // namespace
}  // namespace lockstep::pipeline_random_test
