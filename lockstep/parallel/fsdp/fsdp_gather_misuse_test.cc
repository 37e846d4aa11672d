// What goes wrong where parameters are gathered, and what is refused there.
#include <functional>
#include <future>
#include <gmock/gmock.h>
#include <memory>
#include <string>
#include <thread>

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

namespace lockstep::fsdp_gather_misuse_test {
namespace {

using fsdp::ShardingStrategy;
using fsdp_test::batch;
using fsdp_test::loss_of;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random;
using testing::run_ranks;
namespace nn = torch::nn;
namespace optim = torch::optim;

TEST(FsdpGatherMisuse, ParametersHaveNoValuesOutsideOfForwardAndBackward) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = fsdp_test::make_net();
    const auto before = net->first->weight.detach().clone();
    torch::Tensor weight;
    {
      FullyShardedDataParallel model(net, {.gather = true});
      weight = net->first->weight;
      EXPECT_THAT(message_of<c10::Error>([&] { weight.sum(); }),
                  HasSubstr("parameter 'first.weight' has no values here"));
      EXPECT_THAT(message_of<c10::Error>([&] { (void)weight.data_ptr(); }),
                  HasSubstr("summon_full_params()"));
      model.summon_full_params([&] { EXPECT_TRUE(at::equal(net->first->weight, before)); },
                               /*writeback=*/false);
      model.summon_full_params([&] {
        const torch::NoGradGuard no_grad;
        net->first->weight.fill_(7);
      });
      EXPECT_TRUE((model.full_state_dict().at("first.weight").toTensor() == 7).all().item<bool>());
      loss_of(model(batch(0, 2, rank))).backward();
      EXPECT_THROW(weight.sum(), c10::Error);
      EXPECT_THAT(message_of<c10::NotImplementedError>([&] {
                    torch::serialize::OutputArchive archive;
                    model.save(archive);
                  }),
                  HasSubstr("save full_state_dict()"));
      EXPECT_THAT(message_of<c10::ValueError>([&] { FullyShardedDataParallel again(net); }),
                  HasSubstr("has a post-accumulate-grad hook already"));
    }
    EXPECT_THAT(message_of<c10::Error>([&] { weight.sum(); }),
                HasSubstr("its wrapper, which gathered them, is gone"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { FullyShardedDataParallel again(net); }),
                HasSubstr("' has no values, for an earlier FullyShardedDataParallel has gathered them"));
  });
}

TEST(FsdpGatherMisuse, MisuseIsAnError) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = fsdp_test::make_net();
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  FullyShardedDataParallel model(
                      net, {.sharding_strategy = ShardingStrategy::HYBRID_SHARD, .gather = true});
                }),
                HasSubstr("leave `gather` out"));
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  FullyShardedDataParallel model(net,
                                                 {.between_hosts = HostCompression::kBf16, .gather = true});
                }),
                HasSubstr("mixed_precision.reduce_dtype"));
    EXPECT_THAT(message_of<c10::Error>([&] { FullyShardedDataParallel model(net, {.gather = rank == 0}); }),
                ::testing::AnyOf(HasSubstr("gathers in another way"), HasSubstr("failed to be wrapped")));

    FullyShardedDataParallel model(net, {.gather = true});
    const auto x = batch(0, 2, rank);
    std::string of_other_thread;
    struct Within : nn::Module {
      explicit Within(fsdp_test::Net net) : inner(register_module("inner", std::move(net))) {}
      torch::Tensor forward(const torch::Tensor& input) {
        within();
        return inner(input);
      }
      fsdp_test::Net inner;
      std::function<void()> within = [] {};
    };
    const auto within = std::make_shared<Within>(fsdp_test::make_net());
    FullyShardedDataParallel outer(within, {.gather = true});
    within->within = [&] {
      std::thread([&] { of_other_thread = message_of<c10::Error>([&] { outer(x); }); }).join();
    };
    outer(x);
    EXPECT_THAT(of_other_thread, HasSubstr("one thread at a time uses it"));
    {
      auto input = batch(0, 2, rank).requires_grad_();
      std::promise<void> is_in_backward, may_go_on;
      input.register_hook([&](const torch::Tensor&) {
        is_in_backward.set_value();
        may_go_on.get_future().wait();
      });
      const auto loss = loss_of(model(input));
      auto backward = std::async(std::launch::async, [&] { loss.backward(); });
      is_in_backward.get_future().wait();
      EXPECT_THAT(message_of<c10::Error>([&] { model(x); }), HasSubstr("one thread at a time uses it"));
      may_go_on.set_value();
      backward.get();
    }
    auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    EXPECT_THAT(message_of<c10::Error>([&] { net->to(at::kFloat); }), HasSubstr("has no values here"));
    const auto old = loss_of(model(x));
    loss_of(model(x)).backward();
    optimizer->step();
    EXPECT_THAT(message_of<c10::Error>([&] { old.backward(); }),
                HasSubstr("modified by an inplace operation"));
    net->first->weight.set_data(torch::zeros({7, 5}, at::kDouble));
    EXPECT_THAT(message_of<c10::Error>([&] { model(x); }),
                HasSubstr("is no longer the one that is gathered"));
  });
}

TEST(FsdpGatherMisuse, AWriteToAGatheredParameterIsAnError) {
  run_ranks(1, [](int rank) {
    auto world = init_process_group();
    auto net = fsdp_test::make_net();
    FullyShardedDataParallel model(net, {.gather = true});
    const auto loss = loss_of(model(batch(0, 1, rank)));
    {
      const torch::NoGradGuard no_grad;
      net->unused->bias.mul_(2);
    }
    const auto message = HasSubstr("parameter 'unused.bias' was written to while it was gathered");
    EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }), message);
    EXPECT_THAT(message_of<c10::Error>([&] { model(batch(0, 1, rank)); }), message);
  });
}

TEST(FsdpGatherMisuse, APlainOptimizerOfTheShardsEndsTheRank) {
  const auto outcomes = testing::run_ranks_collect(1, [&](int) {
    auto world = init_process_group();
    FullyShardedDataParallel model(fsdp_test::make_net(), {.gather = true});
    optim::SGD optimizer({model.parameters()[0]}, optim::SGDOptions(0.1));
    loss_of(model(batch(0, 1))).backward();
    optimizer.step();
  });
  if (outcomes[0].pid == 0) return;  // within a rank
  EXPECT_NE(outcomes[0].exit_status, 0);
  EXPECT_THAT(outcomes[0].output, HasSubstr("written to parameter 'scale' of a FullyShardedDataParallel"));
}

TEST(FsdpGatherMisuse, RanksThatUseGroupsInDifferentOrdersAreTold) {
  struct Either : nn::Module {
    nn::Linear one = register_module("one", nn::Linear(4, 4)),
               other = register_module("other", nn::Linear(4, 4));
    torch::Tensor forward(const torch::Tensor& x, bool swapped) {
      return swapped ? one(other(x)) : other(one(x));
    }
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    FullyShardedDataParallel model(
        std::make_shared<Either>(),
        {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(), .gather = true});
    EXPECT_THAT(message_of<c10::DistBackendError>([&] {
                  model(torch::ones({2, 4}), rank == 1);
                }),
                HasSubstr(rank == 0 ? "needs the parameters of 'one' next, but rank 1 those of 'other'"
                                    : "needs the parameters of 'other' next, but rank 0 those of 'one'"));
    EXPECT_THAT(message_of<c10::DistBackendError>([&] {
                  model(torch::ones({2, 4}), false);
                }),
                HasSubstr("all ranks must use them in the same order"));
  });
}

/// Trains with a gather that fails on rank 1; the n-th of a step: some in forward, others in backward.
TEST(FsdpGatherMisuse, AGatherThatFailsIsThrownOnAllRanksAndNoStepIsTaken) {
  for (const int gather_number : {1, 4, 6}) {
    run_ranks(3, [&](int rank) {
      auto world = init_process_group();
      nn::Sequential net;
      for (int i = 0; i < 4; ++i) net->push_back(nn::Linear(16, 16));
      FullyShardedDataParallel model(
          net, {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(), .gather = true});
      const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
      const auto x = random({3, 16}, static_cast<uint64_t>(rank), at::kFloat).requires_grad_();
      const auto train = [&] {
        optimizer->zero_grad();
        model(x).sum().backward();
        optimizer->step();
      };
      train();
      train();
      const auto before = testing::copies(model.parameters());
      if (rank == 1)
        failpoint::configure("fsdp_gather=error(no memory left)@" + std::to_string(gather_number));
      EXPECT_THAT(message_of<c10::Error>(train), HasSubstr(rank == 1 ? "no memory left" : "rank 1"));
      EXPECT_THROW(optimizer->step(), c10::Error);
      EXPECT_THROW(model(x), c10::Error);
      testing::expect_equal(model.parameters(), before);
    });
  }
}

TEST(FsdpGatherMisuse, ADeadRankIsNamedOnAll) {
  fsdp_test::expect_a_killed_rank_is_named(
      {.ranks = 3, .victim = 1, .last_operation = 16, .every = 5, .gathers = true, .where = ".*"},
      {.gather = true});
}

}  // namespace
}  // namespace lockstep::fsdp_gather_misuse_test
