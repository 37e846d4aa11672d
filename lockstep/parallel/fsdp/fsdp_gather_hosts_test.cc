// FULL_SHARD and SHARD_GRAD_OP over several hosts.
#include <functional>
#include <gmock/gmock.h>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/testing/training.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::fsdp_gather_hosts_test {
namespace {

using fsdp_test::batch;
using fsdp_test::compare;
using fsdp_test::loss_of;
using ::testing::ContainsRegex;
using testing::message_of;
using testing::run_ranks;
namespace nn = torch::nn;
namespace optim = torch::optim;

class FsdpGatherHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  }
};

std::function<void(FullyShardedDataParallelOptions&)> strategy(fsdp::ShardingStrategy chosen) {
  return [chosen](FullyShardedDataParallelOptions& options) {
    options.sharding_strategy = chosen;
    options.forward_prefetch = true;
  };
}

TEST_F(FsdpGatherHosts, TrainAsOneProcess) {
  compare({.adjust = strategy(fsdp::ShardingStrategy::FULL_SHARD)}, 3, 3);
}

// With unequally many ranks on each.
TEST_F(FsdpGatherHosts, TrainInGroupsWithAccumulationAndClipping) {
  for (const auto chosen : {fsdp::ShardingStrategy::FULL_SHARD, fsdp::ShardingStrategy::SHARD_GRAD_OP}) {
    compare({.adam = true,
             .accumulate = true,
             .max_norm = 0.1,
             .policy = fsdp::module_wrap_policy<nn::LinearImpl, nn::LSTMImpl>(),
             .adjust = strategy(chosen)},
            5, 2);
  }
}

// In whatever operation of a step: gathers, reductions, agreements, and the step's meetings.
TEST_F(FsdpGatherHosts, ADeadRankIsNamedOnAll) {
  constexpr int kVictim = 2;
  for (int operation = 1; operation <= 16; operation += 5) {
    const std::string death = "announce=kill(9)@" + std::to_string(operation);
    const auto outcomes = testing::run_ranks_collect(
        4,
        [&](int rank) {
          auto world = init_process_group();
          auto net = fsdp_test::make_net();
          FullyShardedDataParallel model(net, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(20)});
          EXPECT_TRUE(model.gathers());
          const auto optimizer = model.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
          const auto text = message_of<c10::Error>([&] {
            for (int step = 0;; ++step) {
              if (rank == kVictim && step == 2) failpoint::configure(death);
              optimizer->zero_grad();
              loss_of(model(batch(step, 4, rank))).backward();
              optimizer->step();
            }
          });
          EXPECT_THAT(text, ContainsRegex("rank 2 \\(pid [0-9]+ on host-1\\) (was )?killed by signal 9"));
        },
        {.expected_failures = {kVictim}, .hosts = 2});
    for (const auto& outcome : outcomes) {
      if (outcome.rank == kVictim) continue;
      EXPECT_EQ(outcome.exit_status.value_or(-1), 0)
          << death << ", rank " << outcome.rank << ": " << outcome.exception.value_or("") << outcome.output;
    }
  }
}

}  // namespace
}  // namespace lockstep::fsdp_gather_hosts_test
