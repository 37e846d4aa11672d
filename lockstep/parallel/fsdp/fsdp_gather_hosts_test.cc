// FULL_SHARD and SHARD_GRAD_OP over several hosts.
#include <functional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/testing/killed_rank.h>
#include <lockstep/parallel/fsdp/testing/training.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::fsdp_gather_hosts_test {
namespace {

using fsdp_test::compare;
namespace nn = torch::nn;

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
  fsdp_test::expect_a_killed_rank_is_named({.ranks = 4,
                                            .victim = 2,
                                            .hosts = 2,
                                            .last_operation = 16,
                                            .every = 5,
                                            .gathers = true,
                                            .where = " on host-1"},
                                           {});
}

}  // namespace
}  // namespace lockstep::fsdp_gather_hosts_test
