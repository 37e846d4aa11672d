#include <algorithm>
#include <chrono>
#include <csignal>
#include <gmock/gmock.h>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/testing/training.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// Training in shards against one process that has all ranks' data.
namespace lockstep::fsdp_test {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::random;
using testing::run_ranks;

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

TEST(FullyShardedDataParallel, TrainsWithRetainedGraphs) {
  compare({.pass = Pass::kRetained, .policy = fsdp::size_based_auto_wrap_policy(20)}, 2);
}

TEST(FullyShardedDataParallel, TrainsWithSeveralForwardsBeforeTheBackwards) {
  compare({.pass = Pass::kTwoForwards, .policy = fsdp::size_based_auto_wrap_policy(1)}, 3);
}

TEST(FullyShardedDataParallel, TrainsWithAGradientPenalty) {
  compare({.adam = true, .pass = Pass::kGradientPenalty, .policy = fsdp::size_based_auto_wrap_policy(20)}, 2);
}

struct Piece : nn::Module {
  explicit Piece(torch::Tensor value) : weight(register_parameter("weight", std::move(value))) {}
  torch::Tensor weight;
};

/// Parameters of any shape, empty ones too; each is used in some steps and not in others, in an order that `order` decides, in
/// which their gradients come.
struct Shapes : nn::Module {
  explicit Shapes(uint64_t seed) {
    std::mt19937_64 generator(seed);
    const auto count = 1 + static_cast<int>(generator() % 9);
    for (int i = 0; i < count; ++i) {
      std::vector<int64_t> sizes;
      for (uint64_t dimensions = generator() % 4; dimensions > 0; --dimensions) {
        sizes.push_back(static_cast<int64_t>(generator() % 12 == 0 ? 0 : 1 + generator() % 7));
      }
      pieces.push_back(register_module("piece" + std::to_string(i),
                                       std::make_shared<Piece>(random(sizes, seed + 1000 + i))));
    }
  }
  torch::Tensor forward(const torch::Tensor& x, int step, uint64_t order) {
    std::vector<size_t> used;
    for (size_t i = 0; i < pieces.size(); ++i) {
      if ((step + i) % 3 > 0) used.push_back(i);
    }
    std::mt19937_64 generator(order);
    std::shuffle(used.begin(), used.end(), generator);
    torch::Tensor sum = x.sum() * 0;
    for (const size_t i : used) {
      const auto& weight = pieces[i]->weight;
      sum = sum + (weight.sin() * x.mean() + weight.square()).sum();
    }
    return sum;
  }
  std::vector<std::shared_ptr<Piece>> pieces;
};

TEST(FullyShardedDataParallel, TrainsParametersOfAnyShapeWhoseGradientsComeInAnyOrder) {
  for (const uint64_t seed : {1, 2, 3, 4, 5, 6, 7, 8}) {
    const int ranks = 1 + static_cast<int>(seed % 6);
    run_ranks(ranks, [&](int rank) {
      auto world = init_process_group();
      const auto net = std::make_shared<Shapes>(seed), alone = std::make_shared<Shapes>(seed);
      FullyShardedDataParallel model(
          net, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(static_cast<int64_t>(seed)),
                .gradient_buffers = 1 + static_cast<int>(seed % 3),
                .gradient_buffer_cap_mb = seed % 2 == 0 ? 1e-5 * static_cast<double>(seed * ranks) : 8});
      const auto optimizer = model.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
      optim::AdamW reference(alone->parameters(), optim::AdamWOptions(0.01));
      for (int step = 0; step < kSteps; ++step) {
        optimizer->zero_grad();
        reference.zero_grad();
        const auto all = random({ranks, 4}, static_cast<uint64_t>(step));
        const auto loss = model(all[rank], step, static_cast<uint64_t>(100 * rank + step));
        if (loss.requires_grad()) loss.backward();
        torch::Tensor mean = torch::zeros({}, at::kDouble);
        for (int i = 0; i < ranks; ++i) mean = mean + alone->forward(all[i], step, 0) / ranks;
        if (mean.requires_grad()) mean.backward();
        optimizer->step();
        reference.step();
      }
      for (size_t i = 0; i < net->pieces.size(); ++i) {
        const auto &actual = net->pieces[i]->weight, &expected = alone->pieces[i]->weight;
        if (actual.numel() == 0) continue;
        EXPECT_LT(testing::difference(actual, expected), 1e-10)
            << "seed " << seed << ", weight " << i << " " << actual.sizes();
      }
    });
  }
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
    auto input = x.clone().requires_grad_();
    input.register_hook([](const torch::Tensor&) { TORCH_CHECK(false, "after all other gradients"); });
    EXPECT_THAT(message_of<c10::Error>([&] { loss_of(model(input)).backward(); }),
                HasSubstr("after all other gradients"));
    EXPECT_THAT(message_of<c10::Error>([&] { model(x); }), HasSubstr("the last backward did not end"));
    Net moved = make_net();
    FullyShardedDataParallel other(moved);
    moved->to(at::kFloat);
    EXPECT_THAT(message_of<c10::Error>([&] { other(x.to(at::kFloat)); }),
                HasSubstr("is no longer where all ranks share it"));
  });
}

TEST(FullyShardedDataParallel, WhatTakesTheModulesParametersForTheOptimizersThrows) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    {
      FullyShardedDataParallel model(net);
      optim::SGD sgd(net->parameters(), optim::SGDOptions(0.1));
      optim::Adam adam(net->parameters(), optim::AdamOptions(0.1));
      for (int step = 0; step < 3; ++step) {
        sgd.zero_grad();
        loss_of(model(batch(step, 2, rank))).backward();
        EXPECT_THAT(message_of<c10::Error>([&] { sgd.step(); }), HasSubstr("meta"));
        EXPECT_THAT(message_of<c10::Error>([&] { adam.step(); }), HasSubstr("meta"));
        EXPECT_THROW(lockstep::clip_grad_norm_(net->parameters(), 1.0).item<double>(), c10::Error);
      }
      EXPECT_NO_THROW(model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1))->step());
    }
    for (const auto& parameter : net->parameters()) {
      EXPECT_FALSE(parameter.grad().defined()) << "nothing is left of the wrapper";
    }
  });
}

TEST(FullyShardedDataParallel, IgnoredParametersStayEachRanksOwn) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net net = make_net(), alone = make_net();
    for (const Net& each : {net, alone}) {
      const torch::NoGradGuard no_grad;
      each->scale.fill_(rank + 1);
      each->first->weight.add_(rank);
    }
    const auto own = net->first->weight;
    const auto* memory = own.const_data_ptr();
    FullyShardedDataParallel model(
        net, {.ignored_modules = {net->first.ptr()}, .ignored_parameters = {net->scale}});
    EXPECT_EQ(own.const_data_ptr(), memory);
    EXPECT_EQ(model.named_parameters().size(), net->named_parameters().size() - 1) << "one is tied";
    const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    optim::SGD reference({alone->scale, alone->first->weight, alone->first->bias}, optim::SGDOptions(0.1));
    loss_of(model(batch(0, 2, rank))).backward();
    loss_of(alone->forward(batch(0, 2, rank))).backward();
    EXPECT_TRUE(at::equal(net->scale.grad(), alone->scale.grad()));
    EXPECT_TRUE(at::equal(own.grad(), alone->first->weight.grad())) << "not averaged";

    // The norm is that of the averages, together with this rank's own.
    std::vector<torch::Tensor> gradients;
    for (const auto& [name, leaf] : model.named_parameters()) {
      if (!leaf.grad().defined()) continue;
      const bool ignored = leaf.is_same(net->scale) || name.starts_with("first.");
      auto square = leaf.grad().square().sum();
      if (!ignored) all_reduce(square);
      gradients.push_back(square);
    }
    const auto expected = torch::stack(gradients).sum().sqrt();
    EXPECT_TRUE(at::allclose(model.clip_grad_norm_(1e9), expected));

    optimizer->step();
    reference.step();
    const auto state = model.full_state_dict();
    EXPECT_TRUE(at::equal(state.at("scale").toTensor(), alone->scale));
    EXPECT_TRUE(at::equal(state.at("first.weight").toTensor(), alone->first->weight));
    EXPECT_TRUE(testing::same_everywhere(state.at("last.weight").toTensor()));
  });
}

TEST(FullyShardedDataParallel, AnInfinityInOneRanksRowsIsAStepLeftOutOnAll) {
  run_ranks(3, [](int) {
    auto world = init_process_group();
    nn::Linear net(1, 3);  // each rank has a row
    FullyShardedDataParallel model(net, {.sync_module_states = true});
    const auto before = net->weight.detach().clone();
    const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    GradScaler scaler({.device = at::kCPU, .init_scale = 4.0});
    const auto step = [&](float of_last_row) {
      optimizer->zero_grad();
      scaler.scale((model(torch::ones({2, 1})) * torch::tensor({1.0F, 1.0F, of_last_row})).sum()).backward();
      scaler.step(*optimizer);
      scaler.update();
    };
    step(std::numeric_limits<float>::infinity());
    EXPECT_TRUE(at::equal(net->weight, before));
    EXPECT_EQ(scaler.get_scale(), 2.0);
    step(1.0F);
    EXPECT_TRUE(at::allclose(net->weight, before - 0.2));
    EXPECT_EQ(scaler.get_scale(), 2.0);
  });
}

/// The others' weights are whole, those of the last step, or they say that they are not.
void train_until_a_rank_dies(int rank, int victim, std::chrono::microseconds delay) {
  auto world = init_process_group();
  Net net = make_net();
  FullyShardedDataParallel model(net, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(20)});
  const auto optimizer = model.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
  auto last = model.full_state_dict();
  try {
    for (int step = 0;; ++step) {
      if (rank == victim && step == 3) testing::die_after(delay);
      optimizer->zero_grad();
      loss_of(model(batch(step, 3, rank))).backward();
      optimizer->step();
      last = model.full_state_dict();
    }
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("rank " + std::to_string(victim)));
  }
  StateDict state;
  try {
    state = model.full_state_dict();
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("an earlier step() has failed"));
    return;
  }
  for (const auto& [name, value] : last) {
    EXPECT_TRUE(at::equal(state.at(name).toTensor(), value.toTensor())) << name;
  }
}

TEST(FullyShardedDataParallel, ARankThatDiesLeavesWholeWeightsOrAnError) {
  std::mt19937 generator(11);
  for (int moment = 0; moment < 20; ++moment) {
    const int victim = moment % 3;
    const std::chrono::microseconds delay(generator() % 6000);
    SCOPED_TRACE("moment " + std::to_string(moment));
    testing::run_survivors(3, {victim}, [&](int rank) { train_until_a_rank_dies(rank, victim, delay); });
  }
}

TEST(FullyShardedDataParallel, ARankThatDiesWhileWeightsAreWrittenIsAnErrorFromThenOn) {
  testing::run_survivors(3, {1}, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    FullyShardedDataParallel model(net);
    const auto maybe_die = [rank] {
      if (rank == 1) testing::die();
    };
    EXPECT_THAT(message_of<c10::Error>([&] { model.summon_full_params(maybe_die); }), HasSubstr("rank 1"));
    EXPECT_THAT(message_of<c10::Error>([&] { model(batch(0, 1)); }),
                HasSubstr("an earlier step() has failed"));
    EXPECT_THAT(message_of<c10::Error>([&] { model.full_state_dict(); }),
                HasSubstr("an earlier step() has failed"));
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
    testing::expect_close(model.full_state_dict(), single.full_state_dict());
    // And back to where it was.
    model.load_sharded_state_dict({sharded});
    testing::expect_close(model.full_state_dict(), state);
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
    testing::expect_equal(net->parameters(), expected->parameters());
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
    const auto weight = after.at("weight").toTensor();
    EXPECT_EQ(weight.scalar_type(), at::kFloat);
    EXPECT_FALSE(at::equal(weight, before.at("weight").toTensor()));
    EXPECT_TRUE(at::equal(net->weight, weight.to(at::kBFloat16))) << "what modules see is made of the shards";
    EXPECT_TRUE(testing::same_everywhere(weight));
  });
}

}  // namespace
}  // namespace lockstep::fsdp_test
