#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/testing/tensors.h>

// Random models in stages, and one process that runs the same micro-batches.
namespace lockstep::pipeline_test {

namespace nn = torch::nn;
using Tensors = std::vector<at::Tensor>;

constexpr PipelineSchedule kSchedules[] = {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B,
                                           PipelineSchedule::kInterleaved1F1B,
                                           PipelineSchedule::kInterleavedZeroBubble};

inline bool is_interleaved(PipelineSchedule schedule) {
  return schedule == PipelineSchedule::kInterleaved1F1B ||
         schedule == PipelineSchedule::kInterleavedZeroBubble;
}

inline at::Tensor mean_of_squares(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

/// The stages of a random model, the same for the same seed.
inline std::vector<nn::Sequential> random_model(uint64_t seed, int64_t stages,
                                                at::ScalarType type = at::kFloat) {
  std::mt19937_64 random(seed);
  torch::manual_seed(seed);
  std::vector<nn::Sequential> model;
  for (int64_t stage = 0; stage < stages; ++stage) {
    nn::Sequential layers;
    for (uint64_t block = 0; block <= random() % 2; ++block) {
      const auto hidden = static_cast<int64_t>(3 + random() % 9);
      layers->push_back(nn::Linear(6, hidden));
      layers->push_back(nn::Tanh());
      if (random() % 2 == 0) layers->push_back(nn::LayerNorm(nn::LayerNormOptions({hidden})));
      layers->push_back(nn::Linear(hidden, 6));
    }
    layers->to(type);
    model.push_back(layers);
  }
  return model;
}

struct Batch {
  at::Tensor data, target;
};

inline Batch random_batch(uint64_t seed, int64_t rows, at::ScalarType type = at::kFloat) {
  return {testing::random({rows, 6}, seed, type), testing::random({rows, 6}, seed + 1, type)};
}

/// One process that runs the same micro-batches.
struct Results {
  Tensors losses;
  at::Tensor output;
};
/// `retains`: for a batch with a graph of its own.
inline Results run_as_one_process(std::vector<nn::Sequential>& model, const Batch& batch,
                                  int64_t micro_batches, bool retains = false) {
  Results results;
  Tensors outputs;
  const auto data = at::tensor_split(batch.data, micro_batches),
             target = at::tensor_split(batch.target, micro_batches);
  for (size_t m = 0; m < data.size(); ++m) {
    at::Tensor x = data[m];
    for (auto& stage : model) x = stage->forward(x);
    outputs.push_back(x.detach());
    const auto loss = mean_of_squares(x, target[m]);
    results.losses.push_back(loss.detach());
    (loss / static_cast<double>(micro_batches)).backward({}, retains);
  }
  results.output = at::cat(outputs);
  return results;
}

inline void expect_same_gradients(const Tensors& actual, const Tensors& wanted) {
  ASSERT_EQ(actual.size(), wanted.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(actual[i].grad().defined()) << i;
    EXPECT_TRUE(at::equal(actual[i].grad(), wanted[i].grad())) << i;
  }
}

/// The rank's stages of a model.
inline std::vector<PipelineStage> stages_of(const std::vector<nn::Sequential>& model, int rank, int64_t ranks,
                                            const ProcessGroup& group = {}) {
  std::vector<PipelineStage> stages;
  for (size_t i = static_cast<size_t>(rank); i < model.size(); i += static_cast<size_t>(ranks)) {
    stages.emplace_back(model[i], static_cast<int64_t>(i), static_cast<int64_t>(model.size()),
                        PipelineStageOptions{.group = group});
  }
  return stages;
}

}  // namespace lockstep::pipeline_test
