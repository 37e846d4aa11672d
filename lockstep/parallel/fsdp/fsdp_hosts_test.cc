#include <gmock/gmock.h>
#include <limits>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/testing/killed_rank.h>
#include <lockstep/parallel/fsdp/testing/training.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// HYBRID_SHARD: the weights lie once on each host, and gradients are averaged between hosts.
namespace lockstep::fsdp_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

constexpr auto kHybrid = fsdp::ShardingStrategy::HYBRID_SHARD;

class FsdpHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  }
};

TEST_F(FsdpHosts, TrainAsOneProcess) {
  compare({}, 4, 2);
}

TEST_F(FsdpHosts, TrainInGroupsWithAccumulationAndClipping) {
  compare({.adam = true,
           .accumulate = true,
           .max_norm = 0.1,
           .policy = fsdp::module_wrap_policy<nn::LinearImpl, nn::LSTMImpl>()},
          6, 2);
}

TEST_F(FsdpHosts, TrainWithOneRankOnEach) {
  compare({.adam = true, .policy = fsdp::size_based_auto_wrap_policy(20)}, 3, 3);
}

TEST_F(FsdpHosts, RanksThatAreSharedOutUnequallyAreRefused) {
  run_ranks(5,
            [](int /*rank*/) {
              auto world = init_process_group();
              Net net = make_net();
              EXPECT_THAT(message_of<c10::ValueError>(
                              [&] { FullyShardedDataParallel(net, {.sharding_strategy = kHybrid}); }),
                          AllOf(HasSubstr("host-1 has 2 ranks of the group"), HasSubstr("host-0 has 3")));
              // The module is as it was.
              EXPECT_NO_THROW(net->to(at::kFloat));
            },
            {.hosts = 2});
}

TEST_F(FsdpHosts, SyncModuleStatesGivesRank0s) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              torch::manual_seed(rank);
              nn::Sequential net(nn::Linear(5, 7), nn::BatchNorm1d(7));
              net->buffers()[0].fill_(rank);
              FullyShardedDataParallel model(net, {.sharding_strategy = kHybrid, .sync_module_states = true});
              torch::manual_seed(0);
              const nn::Sequential expected(nn::Linear(5, 7), nn::BatchNorm1d(7));
              testing::expect_equal(net->parameters(), expected->parameters());
              EXPECT_EQ(net->buffers()[0].max().item<float>(), 0);
            },
            {.hosts = 2});
}

TEST_F(FsdpHosts, WhatFailsOnOneHostIsWrittenOnNone) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              Net net = make_net();
              FullyShardedDataParallel model(net, {.sharding_strategy = kHybrid});
              const auto before = model.full_state_dict();
              const auto text = message_of<c10::Error>([&] {
                model.summon_full_params([&] {
                  const torch::NoGradGuard no_grad;
                  net->first->weight.fill_(7);
                  TORCH_CHECK(rank != 3, "not on rank 3");
                });
              });
              EXPECT_THAT(text, HasSubstr(rank == 3 ? "not on rank 3" : "1 rank of the group failed"));
              testing::expect_close(model.full_state_dict(), before);
              // What has a wrong size on a rank of one host is loaded by none.
              auto state = before;
              if (rank == 2) state["scale"] = torch::ones({2});
              EXPECT_THROW(model.load_full_state_dict(state), c10::Error);
              testing::expect_close(model.full_state_dict(), before);
              // The state of rank 0 alone is that of the job's.
              EXPECT_EQ(model.full_state_dict(/*rank0_only=*/true).empty(), rank != 0);
            },
            {.hosts = 2});
}

TEST_F(FsdpHosts, CompressedGradientsAreTheSameEverywhere) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              const auto train_with = [&](HostCompression compression) {
                torch::manual_seed(4);
                // Rows that two ranks share out unequally, and more groups than buffers: what follows a rank's rows is old.
                nn::Sequential net(nn::Linear(64, 301), nn::Tanh(), nn::Linear(301, 33), nn::Linear(33, 3));
                FullyShardedDataParallel model(net, {.sharding_strategy = kHybrid,
                                                     .auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1),
                                                     .gradient_buffers = 1,
                                                     .gradient_buffer_cap_mb = 0.02,
                                                     .between_hosts = compression});
                auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
                const auto output = [&](int step) {
                  return model(testing::random({8, 64}, static_cast<uint64_t>(10 * step + rank), at::kFloat));
                };
                // As a GradScaler's that was too large, and whose step is left out.
                (output(0) * std::numeric_limits<float>::infinity()).sum().backward();
                for (int step = 0; step < 5; ++step) {
                  optimizer->zero_grad();
                  output(step).square().mean().backward();
                  optimizer->step();
                }
                return model.full_state_dict();
              };
              const auto exact = train_with(HostCompression::kNone);
              for (const auto compression : {HostCompression::kBf16, HostCompression::kInt8}) {
                for (const auto& [name, value] : train_with(compression)) {
                  const auto rounded = value.toTensor(), wanted = exact.at(name).toTensor();
                  EXPECT_TRUE(testing::same_everywhere(rounded)) << name << ", " << to_string(compression);
                  EXPECT_FALSE(at::equal(rounded, wanted)) << name << ", " << to_string(compression);
                  EXPECT_LT(testing::difference(rounded, wanted), 1e-2)
                      << name << ", " << to_string(compression);
                }
              }
            },
            {.hosts = 2});
}

TEST_F(FsdpHosts, HostsBeginWithTheSameAndStayTheSame) {
  run_ranks(
      4,
      [](int rank) {
        auto world = init_process_group();
        torch::manual_seed(rank);
        nn::Sequential net(nn::Linear(5, 7), nn::Linear(7, 2));
        const auto own = net->parameters().back();  // each rank's own, and with a gradient of its own
        FullyShardedDataParallel model(net, {.sharding_strategy = kHybrid, .ignored_parameters = {own}});
        auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.5));
        const auto expect_same_weights = [&] {
          for (const auto& [name, value] : model.full_state_dict()) {
            if (name == "1.bias") continue;
            EXPECT_TRUE(testing::same_everywhere(value.toTensor())) << name;
          }
        };
        expect_same_weights();
        for (int step = 0; step < 3; ++step) {
          optimizer->zero_grad();
          (model(testing::random({8, 5}, static_cast<uint64_t>(10 * step + rank), at::kFloat)) * (1 + rank))
              .sum()
              .backward();
          model.clip_grad_norm_(0.1);
          optimizer->step();
          expect_same_weights();
        }
      },
      {.hosts = 2});
}

// Also those that take part in no operation in which it happens, and wait in another one.
TEST_F(FsdpHosts, AnErrorInAnOperationOfOneHostIsToldOnAll) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              FullyShardedDataParallel model(make_net(), {.sharding_strategy = kHybrid});
              const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
              loss_of(model(batch(0, 4, rank))).backward();
              if (rank == 0) failpoint::configure("announce=error(no memory today)");
              const auto text = message_of<c10::Error>([&] {
                model.clip_grad_norm_(1.0);  // each host's ranks by themselves
                optimizer->step();
              });
              EXPECT_THAT(text, HasSubstr(rank == 0 ? "no memory today" : "aborted by rank 0"));
            },
            {.hosts = 2});
}

// At each operation of a step: reductions within hosts and between them, agreements, and the step's meetings.
TEST_F(FsdpHosts, ADeadRankIsNamedOnAll) {
  expect_a_killed_rank_is_named(
      {.ranks = 6, .victim = 3, .hosts = 2, .last_operation = 12, .where = " on host-1"},
      {.sharding_strategy = kHybrid});
}

}  // namespace
}  // namespace lockstep::fsdp_test
