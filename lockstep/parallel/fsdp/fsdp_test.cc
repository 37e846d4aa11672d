#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// Training in shards against one process that has all ranks' data.
namespace lockstep::fsdp_test {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random;
using testing::run_ranks;

constexpr int kSteps = 20;

/// Layers of sizes that no number of ranks divides, a frozen weight, a tied one, an unused one, and a number.
struct NetImpl : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(5, 7));
  nn::LSTM recurrent = register_module("recurrent", nn::LSTM(nn::LSTMOptions(7, 3).batch_first(true)));
  nn::Linear last = register_module("last", nn::Linear(3, 2));
  nn::Linear unused = register_module("unused", nn::Linear(2, 2));
  torch::Tensor scale = register_parameter("scale", torch::ones({}));
  torch::Tensor frozen = register_parameter("frozen", torch::full({3}, 0.5), /*requires_grad=*/false);
  torch::Tensor tied = register_parameter("tied", last->weight);
  bool checkpointed = false;

  torch::Tensor forward(const torch::Tensor& x) {
    const auto front = [this](const torch::Tensor& input) { return torch::tanh(first(input)); };
    const auto hidden = checkpointed ? activation_checkpoint({}, front, x) : front(x);
    const auto y = std::get<0>(recurrent(hidden)) + frozen;
    return scale * (last(y) + torch::matmul(y, tied.t()));
  }
};
TORCH_MODULE(Net);

Net make_net() {
  torch::manual_seed(4);
  Net net;
  net->to(at::kDouble);
  return net;
}

/// What all ranks train on in a step, and rank's part of it.
torch::Tensor batch(int step, int ranks, std::optional<int> rank = {}) {
  const auto all = random({2 * ranks, 4, 5}, static_cast<uint64_t>(100 + step));
  return rank ? all.narrow(0, 2 * *rank, 2) : all;
}

torch::Tensor loss_of(const torch::Tensor& output) {
  return output.square().mean() + output.mean();
}

struct Recipe {
  bool adam = false;
  bool accumulate = false;  // two batches a step
  double max_norm = 0;      // 0: none
  bool checkpointed = false;
  fsdp::AutoWrapPolicy policy = {};
};

template <class Model, class Optimizer, class Clip>
void train(Model& model, Optimizer& optimizer, const Recipe& recipe, int ranks, std::optional<int> rank,
           const std::function<void(const std::function<void()>&)>& without_sync, const Clip& clip) {
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    if (recipe.accumulate) without_sync([&] { loss_of(model(batch(1000 + step, ranks, rank))).backward(); });
    loss_of(model(batch(step, ranks, rank))).backward();
    if (recipe.max_norm > 0) clip(recipe.max_norm);
    optimizer.step();
  }
}

std::vector<NamedTensor> train_alone(const Recipe& recipe, int ranks) {
  Net net = make_net();
  std::unique_ptr<optim::Optimizer> optimizer;
  if (recipe.adam) {
    optimizer = std::make_unique<optim::AdamW>(net->parameters(), optim::AdamWOptions(0.01));
  } else {
    optimizer = std::make_unique<optim::SGD>(net->parameters(), optim::SGDOptions(0.05).momentum(0.9));
  }
  train(
      net, *optimizer, recipe, ranks, {}, [](const auto& action) { action(); },
      [&](double norm) { lockstep::clip_grad_norm_(net->parameters(), norm); });
  std::vector<NamedTensor> state;
  for (const auto& item : net->named_parameters()) state.emplace_back(item.key(), item.value());
  return state;
}

void expect_same(const std::vector<NamedTensor>& actual, const std::vector<NamedTensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].first, expected[i].first);
    EXPECT_LT(testing::difference(actual[i].second, expected[i].second), 1e-10) << actual[i].first;
  }
}

/// Trains in shards and compares with one process; all ranks see the same weights, bit for bit.
void compare(const Recipe& recipe, int ranks) {
  run_ranks(ranks, [&](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    net->checkpointed = recipe.checkpointed;
    FullyShardedDataParallel model(net, {.auto_wrap_policy = recipe.policy});
    const auto run = [&](auto& optimizer) {
      train(
          model, optimizer, recipe, ranks, rank,
          [&](const auto& action) {
            const auto guard = model.no_sync();
            action();
          },
          [&](double norm) { model.clip_grad_norm_(norm); });
    };
    if (recipe.adam) {
      run(*model.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01)));
    } else {
      run(*model.make_optimizer<optim::SGD>(optim::SGDOptions(0.05).momentum(0.9)));
    }
    const auto state = model.full_state_dict();
    expect_same(state, train_alone(recipe, ranks));
    for (const auto& [name, value] : state) EXPECT_TRUE(testing::same_everywhere(value)) << name;
  });
}

TEST(FullyShardedDataParallel, TrainsAsOneProcess) {
  compare({}, 2);
}

TEST(FullyShardedDataParallel, TrainsWithMoreRanksThanRows) {
  compare({.adam = true, .policy = fsdp::size_based_auto_wrap_policy(1)}, 4);
}

TEST(FullyShardedDataParallel, TrainsInGroupsWithAccumulationAndClipping) {
  compare({.adam = true,
           .accumulate = true,
           .max_norm = 0.1,
           .policy = fsdp::module_wrap_policy<nn::LinearImpl, nn::LSTMImpl>()},
          3);
}

TEST(FullyShardedDataParallel, TrainsWithActivationCheckpoints) {
  compare({.checkpointed = true, .policy = fsdp::size_based_auto_wrap_policy(20)}, 2);
}

TEST(FullyShardedDataParallel, WeightsLieOnceAndAreReadOnly) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    const auto before = net->first->weight.detach().clone();
    FullyShardedDataParallel model(net);
    EXPECT_TRUE(at::equal(net->first->weight, before));
    // What the owner writes through its shard, the other rank sees where its module looks.
    const auto shards = model.named_parameters();
    EXPECT_EQ(shards[0].first, "scale");
    EXPECT_EQ(model.parameters().size(), shards.size());
    auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(1.0));
    for (auto& shard : model.parameters()) {
      if (shard.requires_grad()) shard.mutable_grad() = torch::full_like(shard, -(rank + 1.0));
    }
    optimizer->step();
    const auto change = (net->first->weight - before).detach();
    EXPECT_TRUE(at::allclose(change.narrow(0, 0, 4), torch::ones({4, 5}, at::kDouble)));
    EXPECT_TRUE(at::allclose(change.narrow(0, 4, 3), torch::full({3, 5}, 2.0, at::kDouble)));
  });
}

TEST(FullyShardedDataParallel, AStrayWriteEndsTheRankWithTheParametersName) {
  const auto outcomes = testing::run_ranks_collect(1, [](int) {
    auto world = init_process_group();
    Net net = make_net();
    FullyShardedDataParallel model(net);
    const torch::NoGradGuard no_grad;
    net->last->bias.mul_(2);
  });
  EXPECT_NE(outcomes[0].exit_status, 0) << "by SIGSEGV, unless a sanitizer has a handler";
  EXPECT_THAT(outcomes[0].output,
              HasSubstr("written to parameter 'last.bias' of a FullyShardedDataParallel"));
}

TEST(FullyShardedDataParallel, MisuseIsAnError) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    Net net = make_net();
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  FullyShardedDataParallel model(net,
                                                 {.sharding_strategy = fsdp::ShardingStrategy::NO_SHARD});
                }),
                HasSubstr("DistributedDataParallel"));
    FullyShardedDataParallel model(net);
    const auto x = batch(0, 1);
    auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    auto old = loss_of(model(x));
    loss_of(model(x)).backward();
    optimizer->step();
    EXPECT_THAT(message_of<c10::Error>([&] { old.backward(); }),
                HasSubstr("modified by an inplace operation"));
    // That backward did not end.
    EXPECT_THAT(message_of<c10::Error>([&] { model(x); }), HasSubstr("the last backward did not end"));
    Net moved = make_net();
    FullyShardedDataParallel other(moved);
    moved->to(at::kFloat);
    EXPECT_THAT(message_of<c10::Error>([&] { other(x.to(at::kFloat)); }),
                HasSubstr("is no longer where all ranks share it"));
  });
}

TEST(FullyShardedDataParallel, ARankEvaluatesAlone) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    FullyShardedDataParallel model(net);
    auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    for (int step = 0; step < 30; ++step) {
      loss_of(model(batch(step, 3, rank))).backward();
      optimizer->step();
      optimizer->zero_grad();
      // As often as it likes, while others go on to their next step.
      const torch::NoGradGuard no_grad;
      const auto first = model(batch(0, 1));
      for (int again = 0; again < (step + rank) % 3; ++again)
        EXPECT_TRUE(at::equal(model(batch(0, 1)), first));
    }
  });
}

TEST(FullyShardedDataParallel, StatesAreTakenByOtherNumbersOfRanks) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    FullyShardedDataParallel model(net, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(20)});
    auto optimizer = model.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
    const auto step = [](auto& trained, auto& with, const torch::Tensor& x) {
      loss_of(trained(x)).backward();
      with.step();
      with.zero_grad();
    };
    for (int i = 0; i < 3; ++i) step(model, *optimizer, batch(i, 3, rank));
    const auto state = model.full_state_dict();
    const auto optim_state = model.full_optim_state_dict(*optimizer);
    const auto sharded = model.sharded_state_dict();
    // Alone: a group of one rank, with all ranks' data.
    Net alone = make_net();
    const auto groups = new_subgroups(1);
    FullyShardedDataParallel single(alone, {.process_group = groups.first});
    single.load_full_state_dict(state);
    auto other = single.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.5));
    single.load_full_optim_state_dict(*other, optim_state);
    for (int i = 3; i < 6; ++i) {
      step(model, *optimizer, batch(i, 3, rank));
      step(single, *other, batch(i, 3));
    }
    expect_same(model.full_state_dict(), single.full_state_dict());
    // And back to where it was.
    model.load_sharded_state_dict(sharded);
    expect_same(model.full_state_dict(), state);
  });
}

TEST(FullyShardedDataParallel, FullParametersCanBeSetBySummoning) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    FullyShardedDataParallel model(net);
    model.summon_full_params([&] {
      const torch::NoGradGuard no_grad;
      net->first->weight.fill_(7);
    });
    EXPECT_TRUE((net->first->weight == 7).all().item<bool>());
    model.summon_full_params(
        [&] {
          const torch::NoGradGuard no_grad;
          net->first->weight.fill_(9);
        },
        /*writeback=*/false);
    EXPECT_TRUE((net->first->weight == 7).all().item<bool>());
    EXPECT_EQ(message_of<c10::Error>([&] {
                model.summon_full_params([&] { TORCH_CHECK(false, rank == 1 ? "not on rank 1" : "stop"); },
                                         /*writeback=*/false);
              }),
              rank == 1 ? "not on rank 1" : "stop");
    EXPECT_NO_THROW(model(batch(0, 1)));
  });
}

TEST(FullyShardedDataParallel, SyncModuleStatesGivesRank0s) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(rank);
    Net net;
    FullyShardedDataParallel model(net, {.sync_module_states = true});
    torch::manual_seed(0);
    const Net expected;
    const auto actual = net->parameters(), wanted = expected->parameters();
    for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(at::equal(actual[i], wanted[i])) << i;
  });
}

TEST(FullyShardedDataParallel, MixedPrecisionComputesInOneAndStepsInAnother) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(1);
    nn::Linear net(4, 6);
    FullyShardedDataParallel model(
        net, {.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(1e-3));
    const auto before = model.full_state_dict();
    const auto output = model(random({3, 4}, static_cast<uint64_t>(rank), at::kFloat));
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16);
    output.to(at::kFloat).square().mean().backward();
    for (const auto& shard : model.parameters()) EXPECT_EQ(shard.grad().scalar_type(), at::kFloat);
    optimizer->step();
    const auto after = model.full_state_dict();
    EXPECT_EQ(after[0].second.scalar_type(), at::kFloat);
    EXPECT_FALSE(at::equal(after[0].second, before[0].second));
    EXPECT_TRUE(at::equal(net->weight, after[0].second.to(at::kBFloat16)))
        << "what modules see is made of the shards";
    EXPECT_TRUE(testing::same_everywhere(after[0].second));
  });
}

}  // namespace
}  // namespace lockstep::fsdp_test
