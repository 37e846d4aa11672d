#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// What pipelines keep: activations in training, messages on their way in eval().
namespace lockstep::pipeline_memory_test {
namespace {

using namespace pipeline_test;
using testing::run_ranks;

/// Counts how many of its outputs' graphs live.
class CountedLayer {
 public:
  explicit CountedLayer(const at::Tensor& weight) : weight_(weight) {}
  at::Tensor operator()(const at::Tensor& x) {
    peak_ = std::max(peak_, ++living_);
    auto* memory = new float[6];
    std::fill_n(memory, 6, 1.5f);
    const auto factor = at::from_blob(
        memory, {6},
        [this](void* freed) {
          --living_;
          delete[] static_cast<float*>(freed);
        },
        at::kFloat);
    return torch::tanh(x + weight_ * factor);  // saved for the gradient of the weight
  }
  int peak() const { return peak_; }
  int living() const { return living_; }

 private:
  at::Tensor weight_;
  int living_ = 0, peak_ = 0;
};

/// Counts how many of the inputs that a stage was given live.
class LivingInputs {
 public:
  void add(const at::Tensor& input) {
    inputs_.emplace_back(input.getIntrusivePtr());
    const auto living = std::ranges::count_if(inputs_, [](const Weak& one) { return !one.expired(); });
    peak_ = std::max<int64_t>(peak_, living);
  }
  int64_t peak() const { return peak_; }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::vector<Weak> inputs_;
  int64_t peak_ = 0;
};

/// How many inputs a rank keeps at most that go with the end of their micro-batch's backward, or with the action `end` before.
int64_t peak_of_inputs(const PipelineRunner& pipeline, ComputationType end) {
  int64_t kept = 0, peak = 0;
  for (const PipelineAction& action : pipeline.actions()) {
    if (action.type == ComputationType::kForward) peak = std::max(peak, ++kept);
    if (action.type == ComputationType::kFullBackward || action.type == end) --kept;
  }
  return peak;
}

TEST(Pipelines, KeepNoMoreActivationsThanTheSchedule) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (const PipelineSchedule schedule :
         {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B, PipelineSchedule::kInterleavedZeroBubble}) {
      SCOPED_TRACE(to_string(schedule));
      CountedLayer layer(torch::ones({6}, at::requires_grad()));
      LivingInputs inputs;
      const auto stage = [&](const at::Tensor& x) {
        inputs.add(x);
        return layer(x);
      };
      PipelineRunner pipeline(PipelineStage(stage, rank, 3),
                              {.schedule = schedule, .n_microbatches = 6, .loss_fn = mean_of_squares});
      const Batch batch = random_batch(1, 12);
      pipeline.step({batch.data}, batch.target, nullptr, /*return_outputs=*/false);
      const int64_t allowed = peak_activations(pipeline_table(schedule, {3, 1, 6}), rank);
      EXPECT_EQ(layer.peak(), allowed);
      EXPECT_EQ(layer.living(), 0);
      EXPECT_EQ(pipeline.memory().activations, allowed);
      EXPECT_EQ(pipeline.memory().bytes_of_inputs, inputs.peak() * 2 * 6 * 4);
      const bool is_split = schedule == PipelineSchedule::kInterleavedZeroBubble;
      EXPECT_EQ(inputs.peak(), is_split
                                   ? peak_of_inputs(pipeline, rank == 0 ? ComputationType::kBackwardInput
                                                                        : ComputationType::kBackwardWeight)
                                   : allowed);
    }
  });
}

TEST(Pipelines, KeepAnInputUntilTheHalfOfBackwardThatNeedsItLast) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto weight = torch::ones({6}, at::requires_grad());
    const auto product = [&](const at::Tensor& x) { return x * weight; };
    enum class Layer { kNeedsItsInput, kNeedsNoInput, kIsComputedAgain };
    for (const Layer kind : {Layer::kNeedsItsInput, Layer::kNeedsNoInput, Layer::kIsComputedAgain}) {
      SCOPED_TRACE(static_cast<int>(kind));
      LivingInputs inputs;
      const auto stage = [&](const at::Tensor& x) {
        inputs.add(x);
        if (kind == Layer::kIsComputedAgain) return activation_checkpoint({}, product, x);
        if (kind == Layer::kNeedsItsInput) return product(x);
        return rank == 0 ? x + weight : torch::tanh(x);
      };
      PipelineRunner pipeline(PipelineStage(stage, rank, 3),
                              {.schedule = PipelineSchedule::kInterleavedZeroBubble,
                               .n_microbatches = 6,
                               .loss_fn = mean_of_squares});
      const Batch batch = random_batch(2, 12);
      pipeline.step({batch.data}, batch.target, nullptr, /*return_outputs=*/false);
      const int64_t first = peak_of_inputs(pipeline, ComputationType::kBackwardInput),
                    second = peak_of_inputs(pipeline, ComputationType::kBackwardWeight);
      EXPECT_EQ(inputs.peak(), kind == Layer::kNeedsItsInput ? second : first);
      EXPECT_EQ(pipeline.memory().bytes_of_inputs, inputs.peak() * 2 * 6 * 4);
      EXPECT_EQ(pipeline.memory().activations, second);
      if (rank > 0) {
        EXPECT_LT(first, second);
      }
    }
  });
}

TEST(Pipelines, EvalKeepsFewMicroBatchesInFlight) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    constexpr int64_t kMicroBatches = 16, kRowBytes = 4096;
    for (const PipelineSchedule schedule : {PipelineSchedule::kGPipe, PipelineSchedule::kInterleaved1F1B}) {
      SCOPED_TRACE(to_string(schedule));
      const int64_t per_rank = is_interleaved(schedule) ? 2 : 1;
      int64_t forwards = 0;
      const auto stage = [&](const at::Tensor& x) {
        // Rank 1 begins when rank 0 has begun with its second one, and is slower from then on.
        at::Tensor token = at::zeros({1});
        if (rank == 0 && forwards == 1) send(token, 1);
        if (rank == 1 && forwards == 0) recv(token, 0);
        ++forwards;
        if (rank == 1) return at::mm(at::ones({300, 300}), at::ones({300, 1})).mean() * 0 + x;
        return x + 1;
      };
      std::vector<PipelineStage> stages;
      for (int64_t index = rank; index < 2 * per_rank; index += 2)
        stages.emplace_back(stage, index, 2 * per_rank);
      PipelineRunner pipeline(stages, {.schedule = schedule, .n_microbatches = kMicroBatches});
      const auto x = testing::random({kMicroBatches, kRowBytes / 4}, 3, at::kFloat);
      const auto outputs = pipeline.eval({x});
      EXPECT_LE(pipeline.memory().bytes_in_flight, 2 * per_rank * kRowBytes);
      if (rank == 1) {
        EXPECT_TRUE(at::equal(outputs.at(0), per_rank == 1 ? x + 1 : x + 1 + 1));
      }
    }
  });
}

/// All stages compute at once, also where the first one sends to the last one.
TEST(Pipelines, EvalGoesAsFarAheadOfALaterStageAsThereAreStagesBetween) {
  constexpr int kRanks = 5;
  run_ranks(kRanks, [](int rank) {
    auto world = init_process_group({.timeout = std::chrono::seconds(60)});
    int64_t forwards = 0;
    const auto stage = [&](const Tensors& x) {
      // The last one begins with its first micro-batch when the first one has come as far as its fifth.
      at::Tensor token = at::zeros({1});
      if (rank == 0 && forwards == kRanks - 1) send(token, kRanks - 1);
      if (rank == kRanks - 1 && forwards == 0) recv(token, 0);
      ++forwards;
      return Tensors{rank == kRanks - 1 ? x.at(0) * x.at(1) : x.at(0) + 1};
    };
    PipelineStageOptions options;
    if (rank == 0) options.outputs_to = {{1, kRanks - 1}};
    PipelineRunner pipeline(PipelineStage(stage, rank, kRanks, options),
                            {.schedule = PipelineSchedule::kGPipe, .n_microbatches = 16});
    const auto x = testing::random({16, 6}, 3, at::kFloat);
    const auto outputs = pipeline.eval({x});
    if (rank == kRanks - 1) {
      EXPECT_TRUE(at::equal(outputs.at(0), (x + 1) * (x + 1 + 1 + 1 + 1)));
    }
  });
}

}  // namespace
}  // namespace lockstep::pipeline_memory_test
