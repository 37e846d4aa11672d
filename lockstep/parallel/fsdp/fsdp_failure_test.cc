// What becomes of a model when a rank's backward ends by an exception of its own.
#include <gmock/gmock.h>
#include <utility>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/testing/training.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::fsdp_failure_test {
namespace {

using fsdp_test::batch;
using fsdp_test::loss_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

/// Throws between the gradients of the last and the first layers.
struct FailingNet : fsdp_test::NetImpl {
  torch::Tensor forward(const torch::Tensor& x) {
    auto hidden = torch::tanh(first(x));
    if (fails) hidden.register_hook([](const torch::Tensor&) { TORCH_CHECK(false, "no such word: xyzzy"); });
    return scale * last(std::get<0>(recurrent(hidden)));
  }
  bool fails = false;
};

void expect_an_exception_is_told(int ranks, int hosts, const FullyShardedDataParallelOptions& options) {
  run_ranks(
      ranks,
      [&](int rank) {
        auto world = init_process_group();
        torch::manual_seed(4);
        const auto net = std::make_shared<FailingNet>();
        net->to(at::kDouble);
        auto own = options;
        own.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(20);
        FullyShardedDataParallel model(net, own);
        const auto optimizer = model.make_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
        loss_of(model(batch(0, ranks, rank))).backward();
        optimizer->step();
        net->fails = rank == 1;
        const auto text = message_of<c10::Error>([&] { loss_of(model(batch(1, ranks, rank))).backward(); });
        EXPECT_THAT(text, HasSubstr("no such word: xyzzy"));
        if (rank != 1) {
          EXPECT_THAT(text, AllOf(HasSubstr("rank 1 (pid "), HasSubstr("failed in backward")));
        }
        net->fails = false;
        message_of<c10::Error>([&] { optimizer->step(); });
        message_of<c10::Error>([&] { model(batch(2, ranks, rank)); });
        barrier();  // other groups are as they were; and until here no rank ends, so that none is told by that
      },
      {.hosts = hosts});
}

TEST(FsdpFailure, AnExceptionInABackwardIsToldOnAllRanks) {
  expect_an_exception_is_told(3, 1, {});
}

TEST(FsdpFailure, AnExceptionInABackwardIsToldWhereParametersAreGathered) {
  expect_an_exception_is_told(3, 1, {.gather = true});
}

TEST(FsdpFailure, AnExceptionInABackwardIsToldOnOtherHosts) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  expect_an_exception_is_told(4, 2, {.sharding_strategy = fsdp::ShardingStrategy::HYBRID_SHARD});
}

TEST(FsdpFailure, AnExceptionWithoutAReductionIsOfThisRankAlone) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto net = std::make_shared<FailingNet>();
    net->to(at::kDouble);
    FullyShardedDataParallel model(net);
    net->fails = rank == 1;
    {
      const auto no_sync = model.no_sync();
      const auto loss = loss_of(model(batch(0, 2, rank)));
      if (rank == 1) {
        EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }), HasSubstr("xyzzy"));
      } else {
        loss.backward();
      }
    }
    net->fails = false;
    model.zero_grad();
    loss_of(model(batch(1, 2, rank))).backward();
  });
}

}  // namespace
}  // namespace lockstep::fsdp_failure_test
