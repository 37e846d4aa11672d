// What DistributedDataParallel tells of its phases.
#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/training/training_phases.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/told_phases.h>

namespace nn = torch::nn;

namespace lockstep::ddp_phases_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Not;
using testing::run_ranks;

TEST(DistributedDataParallel, TheRoundsEndBelongsToBackward) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    const testing::ToldPhases told;
    for (const bool static_graph : {false, true}) {
      nn::Linear layer(4, 3);
      DistributedDataParallel model(layer, {.static_graph = static_graph});
      DistributedDataParallel head(nn::Linear(3, 1), {.static_graph = static_graph});
      // In memory of the user's, to which the average is copied at the end of the round.
      layer->weight.mutable_grad() = torch::zeros({3, 4});
      for (int step = 0; step < 3; ++step) {
        const auto loss = head(model(torch::ones({2, 4}))).sum();
        const auto phases = told.of_operators([&] { loss.backward(); });
        EXPECT_THAT(phases,
                    AllOf(Contains(TrainingPhase::kBackward), Not(Contains(TrainingPhase::kOptimizer))))
            << static_graph << ' ' << step;
        EXPECT_EQ(told.phase(), TrainingPhase::kOptimizer);
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::ddp_phases_test
