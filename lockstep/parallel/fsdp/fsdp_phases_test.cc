// What FullyShardedDataParallel tells of its steps and phases.
#include <cstdint>
#include <gmock/gmock.h>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/training/training_phases.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/told_phases.h>

namespace nn = torch::nn;

namespace lockstep::fsdp_phases_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;
using testing::run_ranks;

TEST(FullyShardedDataParallel, TellsOfItsStepsAndPhases) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    const testing::ToldPhases told;
    FullyShardedDataParallel model(nn::Linear(4, 3));
    const auto optimizer = model.make_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
    for (uint64_t step = 1; step <= 3; ++step) {
      for (const bool reduces : {false, true}) {
        std::optional<decltype(model.no_sync())> no_sync;
        if (!reduces) no_sync.emplace(model.no_sync());
        const auto input = torch::ones({2, 4}) * torch::ones({}).requires_grad_();
        auto within = TrainingPhase::kNone;
        // After the weights' gradients, which autograd takes first.
        input.register_hook([&](const torch::Tensor&) { within = told.phase(); });
        const auto loss = model(input).sum();
        EXPECT_EQ(told.phase(), TrainingPhase::kForward);
        EXPECT_EQ(told.board().newest_step().number, step) << "one for both backwards";
        loss.backward();
        EXPECT_EQ(within, TrainingPhase::kBackward) << reduces;
        EXPECT_EQ(told.phase(), TrainingPhase::kOptimizer);
      }
      optimizer->step();
    }
  });
}

TEST(FullyShardedDataParallel, AForwardThatIsComputedAgainBelongsToBackward) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    const testing::ToldPhases told;
    const auto noting = std::make_shared<testing::PhaseNoting>(told);
    FullyShardedDataParallel model(noting);
    FullyShardedDataParallel head(nn::Linear(3, 1));
    const auto body = [&](const torch::Tensor& x) { return model(x); };
    head(activation_checkpoint({}, body, torch::ones({2, 4}))).sum().backward();
    EXPECT_THAT(noting->phases, ElementsAre(TrainingPhase::kForward, TrainingPhase::kBackward));
    EXPECT_EQ(told.board().newest_step().number, 1U);
  });
}

/// Half of it has no gradient, so that the rest of the reduction is left for the end of backward.
struct HalfUsed : nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return used(x); }
  nn::Linear used = register_module("used", nn::Linear(4, 3));
  nn::Linear unused = register_module("unused", nn::Linear(4, 3));
};

TEST(FullyShardedDataParallel, TheRestOfTheReductionBelongsToBackward) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    const testing::ToldPhases told;
    FullyShardedDataParallel model(std::make_shared<HalfUsed>()), other(std::make_shared<HalfUsed>());
    for (const bool both : {false, true}) {
      auto loss = model(torch::ones({2, 4})).sum();
      if (both) loss = loss + other(torch::ones({2, 4})).sum();
      const auto phases = told.of_operators([&] { loss.backward(); });
      EXPECT_THAT(phases,
                  AllOf(Contains(TrainingPhase::kBackward), Not(Contains(TrainingPhase::kOptimizer))));
      EXPECT_EQ(told.phase(), TrainingPhase::kOptimizer);
    }
  });
}

}  // namespace
}  // namespace lockstep::fsdp_phases_test
