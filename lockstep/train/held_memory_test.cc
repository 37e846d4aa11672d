// What a trace tells of memory that models and optimizers had before it was recorded.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/profiler/profiler.h>
#include <lockstep/profiler/trace_analysis.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/train/testing/fixtures.h>
#include <lockstep/train/trainer.h>

namespace lockstep::held_memory_test {
namespace {

namespace nn = torch::nn;
using profiler::HeldMemory;
using testing::run_ranks;
using testing::TemporaryFolder;

HeldMemory held_in(const TemporaryFolder& folder) {
  return profiler::analyze_traces(folder.path().string()).ranks.at(0).memory.at(0).held;
}

/// As a trace of one step tells it.
HeldMemory held_before(const std::function<void()>& step) {
  const TemporaryFolder folder;
  {
    Profiler profile({.schedule = profiler::schedule({.active = 1, .repeat = 1}),
                      .on_trace_ready = profiler::tensorboard_trace_handler(folder.path().string()),
                      .profile_memory = true});
    step();
    profile.step();
  }
  return held_in(folder);
}

/// Its weight and bias end on cache lines, so that a bucket of their gradients has no gaps.
nn::Linear make_layer() {
  nn::Linear layer(16, 8);
  layer->to(torch::kDouble);
  return layer;
}
constexpr int64_t kLayerBytes = (16 * 8 + 8) * 8;

template <class Model>
void backward_of(Model& model, int rank) {
  model(testing::random({4, 16}, static_cast<uint64_t>(rank))).square().mean().backward();
}

TEST(HeldMemory, OfADistributedDataParallelIsItsParametersAndBuckets) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Linear layer = make_layer();
    DistributedDataParallel model(layer);
    const auto step = [&] { backward_of(model, rank); };
    for (const char* gradients : {"there are none yet", "they lie in a bucket", "they were dropped"}) {
      const HeldMemory held = held_before(step);
      EXPECT_EQ(held.parameters, kLayerBytes) << gradients;
      EXPECT_EQ(held.gradients, kLayerBytes) << gradients;
      EXPECT_EQ(held.optimizer_state, 0) << "nothing tells of it";
      if (std::string(gradients) == "they lie in a bucket") layer->zero_grad();
    }
  });
}

TEST(HeldMemory, OfAFullyShardedDataParallelIsWhatTheRankOwns) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto check = [&](const FullyShardedDataParallelOptions& options, int64_t parameters,
                           int64_t gradients, int64_t buffers) {
      FullyShardedDataParallel model(make_layer(), options);
      const auto optimizer = model.make_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
      const auto step = [&] { backward_of(model, rank); };
      step();
      HeldMemory held = held_before(step);
      EXPECT_EQ(held.parameters, parameters);
      EXPECT_EQ(held.gradients, gradients + buffers);
      optimizer->zero_grad();
      held = held_before(step);
      EXPECT_EQ(held.parameters, parameters);
      EXPECT_EQ(held.gradients, buffers);
    };
    constexpr int64_t kRows = kLayerBytes / 2;
    check({}, kRows, kRows, /*buffers=*/kLayerBytes);
    // Modules see the rows in another dtype, in which gradients are reduced.
    check({.mixed_precision = {.param_dtype = torch::kFloat}}, kRows + kRows / 2, kRows,
          /*buffers=*/kLayerBytes / 2);
  });
}

TEST(HeldMemory, OfAPipelineIsItsStages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Linear layer(16, 16);
    PipelineRunner pipeline(PipelineStage(layer, rank, 2), {.n_microbatches = 2, .loss_fn = nn::MSELoss()});
    const auto batch = testing::random({4, 16}, 1, torch::kFloat);
    const auto step = [&] { pipeline.step({batch}, batch); };
    constexpr int64_t kBytes = (16 * 16 + 16) * 4;
    HeldMemory held = held_before(step);
    EXPECT_EQ(held.parameters, kBytes);
    EXPECT_EQ(held.gradients, 0) << "there are none yet";
    held = held_before(step);
    EXPECT_EQ(held.gradients, kBytes);
  });
}

TEST(HeldMemory, OfATrainerHasTheOptimizersState) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    const TemporaryFolder folder;
    DistributedDataParallel model(std::make_shared<testing::SmallNet>());
    torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(0.1));
    data::DistributedSampler sampler(8);
    testing::Loader loader(testing::Points{8}, {.sampler = &sampler});
    Trainer trainer(model, optimizer, loader, testing::loss_of,
                    {.progress_bar = false,
                     .profiler = ProfilerOptions{
                         .schedule = profiler::schedule({.wait = 1, .active = 1, .repeat = 1}),
                         .on_trace_ready = profiler::tensorboard_trace_handler(folder.path().string()),
                         .profile_memory = true}});
    trainer.train();
    const HeldMemory held = held_in(folder);
    constexpr int64_t kBytes = (3 * 8 + 8 + 8 + 1) * 8;
    EXPECT_EQ(held.parameters, kBytes);
    EXPECT_GE(held.gradients, kBytes);
    EXPECT_EQ(held.optimizer_state, 2 * kBytes) << "Adam's two tensors";
  });
}

}  // namespace
}  // namespace lockstep::held_memory_test
