// What FullyShardedDataParallel refuses, on all ranks at once, and what it leaves as it was then.
#include <atomic>
#include <functional>
#include <gmock/gmock.h>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::fsdp_misuse_test {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random;
using testing::run_ranks;

const fsdp::MixedPrecision kHalf{.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16};

/// Weights, a buffer, and a function that runs within forward.
struct NetImpl : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(3, 4));
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(4));
  nn::Linear last = register_module("last", nn::Linear(4, 2));
  torch::Tensor offset = register_buffer("offset", torch::full({2}, 0.1F));
  std::function<void()> within = [] {};

  torch::Tensor forward(const torch::Tensor& x) {
    within();
    return last(norm(first(x))) + offset;
  }
};
TORCH_MODULE(Net);

Net make_net() {
  torch::manual_seed(4);
  return Net();
}

torch::Tensor batch(int rank) {
  return random({6, 3}, static_cast<uint64_t>(rank), at::kFloat);
}

std::unique_ptr<ShardedOptimizer<optim::SGD>> sgd_of(FullyShardedDataParallel<NetImpl>& model) {
  return model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
}

TEST(FsdpMisuse, APlainOptimizerOfTheShardsEndsTheRankWithTheParametersName) {
  for (const auto& precision : {fsdp::MixedPrecision(), kHalf}) {
    const auto outcomes = testing::run_ranks_collect(1, [&](int) {
      auto world = init_process_group();
      FullyShardedDataParallel model(make_net(), {.mixed_precision = precision});
      optim::SGD optimizer({model.parameters()[0]}, optim::SGDOptions(0.1));
      model(batch(0)).sum().backward();
      optimizer.step();
    });
    if (outcomes[0].pid == 0) continue;  // within a rank
    EXPECT_NE(outcomes[0].exit_status, 0) << "by SIGSEGV, unless a sanitizer has a handler";
    EXPECT_THAT(outcomes[0].output,
                HasSubstr("written to parameter 'first.weight' of a FullyShardedDataParallel"));
  }
}

TEST(FsdpMisuse, AModuleHasOneWrapperAtATime) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    {
      FullyShardedDataParallel model(net);
      EXPECT_THAT(message_of<c10::ValueError>([&] { FullyShardedDataParallel again(net); }),
                  HasSubstr("parameter 'first.weight' has a post-accumulate-grad hook already"));
      EXPECT_THAT(message_of<c10::ValueError>([&] { FullyShardedDataParallel part(net->last); }),
                  HasSubstr("'weight'"));
      model(batch(rank)).sum().backward();
      for (const auto& shard : model.parameters()) EXPECT_TRUE(shard.grad().defined());
    }
    EXPECT_NO_THROW(FullyShardedDataParallel again(net));
  });
}

TEST(FsdpMisuse, WhatMixedPrecisionHasLeftIsNotWrappedAgain) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    nn::Linear net(3, 4);
    StateDict state;
    {
      FullyShardedDataParallel model(net, {.mixed_precision = kHalf});
      state = model.full_state_dict();
    }
    for (const auto& precision : {kHalf, fsdp::MixedPrecision()}) {
      EXPECT_THAT(message_of<c10::ValueError>(
                      [&] { FullyShardedDataParallel again(net, {.mixed_precision = precision}); }),
                  HasSubstr("parameter 'weight' has the values in BFloat16"));
    }
    net->to(at::kFloat);
    FullyShardedDataParallel again(net, {.mixed_precision = kHalf});
    again.load_full_state_dict(state);
    expect_equal(again.full_state_dict(), state);
  });
}

TEST(FsdpMisuse, WhatOneRankRefusesIsRefusedByAllAndChangesNothing) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    const auto weight = net->first->weight;
    const auto* memory = weight.const_data_ptr();
    EXPECT_THAT(
        message_of<c10::Error>([&] {
          FullyShardedDataParallel model(
              net, {.sharding_strategy =
                        rank == 1 ? fsdp::ShardingStrategy::NO_SHARD : fsdp::ShardingStrategy::FULL_SHARD});
        }),
        HasSubstr(rank == 1 ? "NO_SHARD keeps a whole model" : "1 rank of the group failed to be wrapped"));
    net->last->to(at::kDouble);
    EXPECT_THAT(message_of<c10::ValueError>([&] { FullyShardedDataParallel model(net); }),
                HasSubstr("'first.weight' and 'last.weight' have different dtypes"));
    EXPECT_EQ(weight.const_data_ptr(), memory);
    net->last->to(at::kFloat);
    EXPECT_THAT(
        message_of<c10::Error>([&] {
          FullyShardedDataParallel model(
              net, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(rank == 0 ? 1 : 100)});
        }),
        HasSubstr(rank == 1 ? "rank 0 has other groups" : "1 rank of the group failed to be wrapped"));

    FullyShardedDataParallel model(net);
    const auto before = model.full_state_dict();
    auto state = before;
    if (rank == 1) state.erase("last.bias");
    EXPECT_THAT(message_of<c10::Error>([&] { model.load_full_state_dict(state); }),
                HasSubstr(rank == 1 ? "last.bias" : "the weights are as they were"));
    auto sharded = model.sharded_state_dict();
    if (rank == 0) sharded.pop_back();
    EXPECT_THAT(message_of<c10::Error>([&] { model.load_sharded_state_dict({sharded}); }),
                HasSubstr(rank == 0 ? "last.bias" : "the weights are as they were"));
    expect_equal(model.full_state_dict(), before);
    model.load_full_state_dict(before);
  });
}

TEST(FsdpMisuse, SummoningThatFailsOnARankWritesNothing) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    FullyShardedDataParallel model(net);
    const auto before = model.full_state_dict();
    const auto fill = [&] {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(7);
    };
    EXPECT_THAT(
        message_of<c10::Error>([&] {
          model.summon_full_params([&] {
            fill();
            TORCH_CHECK(rank == 0, "not on rank 1");
          });
        }),
        HasSubstr(rank == 1 ? "not on rank 1" : "1 rank of the group failed in summon_full_params()"));
    expect_equal(model.full_state_dict(), before);
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  model.summon_full_params([&] {
                    fill();
                    net->first->weight.set_data(torch::zeros({3, 4}));
                  });
                }),
                HasSubstr("parameter 'first.weight' has sizes [4, 3], but a tensor of [3, 4]"));
    expect_equal(model.full_state_dict(), before);
    EXPECT_NO_THROW(model(batch(rank)));
  });
}

TEST(FsdpMisuse, ARankWithoutMemoryForWholeValuesLeavesNoOtherWaiting) {
  for (const auto& precision : {fsdp::MixedPrecision(), kHalf}) {
    run_ranks(3, [&](int rank) {
      auto world = init_process_group();
      Net net = make_net();
      FullyShardedDataParallel model(net, {.mixed_precision = precision});
      const auto optimizer = model.make_optimizer<optim::Adam>(optim::AdamOptions(0.1));
      model(batch(rank)).to(at::kFloat).sum().backward();
      optimizer->step();
      const auto before = model.full_state_dict();
      const auto fail_at = [&](const std::string& place, const std::string& told, const auto& action) {
        if (rank == 1) failpoint::configure(place + "=error(no memory today)");
        EXPECT_THAT(message_of<c10::Error>(action), HasSubstr(rank == 1 ? "no memory today" : told));
        failpoint::configure("");
      };
      fail_at("fsdp.summon.allocate",
              "1 rank of the group failed in summon_full_params(); the weights are as they were",
              [&] { model.summon_full_params([&] { ADD_FAILURE() << "it must not run"; }); });
      fail_at("fsdp.state.allocate",
              "1 rank of the group failed to allocate memory for full_optim_state_dict()",
              [&] { model.full_optim_state_dict(*optimizer); });
      if (precision.is_used()) {
        fail_at("fsdp.state.allocate", "1 rank of the group failed to allocate memory for full_state_dict()",
                [&] { model.full_state_dict(); });
      }
      expect_equal(model.full_state_dict(), before);
      optimizer->zero_grad();
      model(batch(rank)).to(at::kFloat).sum().backward();
      optimizer->step();
    });
  }
}

TEST(FsdpMisuse, AFrozenParameterStaysFrozen) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    net->first->weight.set_requires_grad(false);
    FullyShardedDataParallel model(net);
    model(batch(rank)).sum().backward();
    net->first->weight.set_requires_grad(true);
    EXPECT_THAT(message_of<c10::Error>([&] { model(batch(rank)); }),
                HasSubstr("parameter 'first.weight' was frozen when it was wrapped"));
  });
}

TEST(FsdpMisuse, ASparseGradientIsRefusedByName) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    nn::Embedding net(nn::EmbeddingOptions(5, 2).sparse(true));
    FullyShardedDataParallel model(net);
    const auto output = model(torch::tensor({1, 3}));
    EXPECT_THAT(message_of<c10::NotImplementedError>([&] { output.sum().backward(); }),
                HasSubstr("the gradient of parameter 'weight' is sparse"));
  });
}

TEST(FsdpMisuse, StepWithinForwardIsRefusedOnAllRanks) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    FullyShardedDataParallel model(net);
    const auto optimizer = sgd_of(model);
    if (rank == 0) {
      net->within = [&] { optimizer->step(); };
      EXPECT_THAT(message_of<c10::Error>([&] { model(batch(rank)); }),
                  HasSubstr("step() while a forward, backward"));
      net->within = [] {};
    } else {
      EXPECT_THAT(message_of<c10::DistBackendError>([&] { optimizer->step(); }),
                  HasSubstr("1 rank of the group failed before any has written"));
    }
    model(batch(rank)).sum().backward();
    optimizer->step();
  });
}

TEST(FsdpMisuse, AnotherThreadEvaluatesWhileThisOneTrains) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    nn::Linear net(nn::LinearOptions(16, 400).bias(false));
    {
      const torch::NoGradGuard no_grad;
      net->weight.zero_();
    }
    FullyShardedDataParallel model(net);
    const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.125));
    const auto x = torch::ones({2, 16});
    std::atomic<bool> done = false;
    std::atomic<int> evaluations = 0;
    std::string error;
    std::thread evaluating([&] {
      const torch::NoGradGuard no_grad;
      try {
        while (!done) {
          const auto output = model(x);
          TORCH_CHECK((output == output[0][0]).all().item<bool>(), "rows of different steps");
          ++evaluations;
        }
      } catch (const std::exception& failure) {
        error = failure.what();
        evaluations = std::numeric_limits<int>::max();
      }
    });
    // All weights are the same at any time.
    auto more = torch::ones({}, at::kInt);  // all ranks make equally many steps
    for (int step = 0; step < 30 || more.item<int>() > 0; ++step) {
      optimizer->zero_grad();
      model(x).sum().backward();
      optimizer->step();
      more.fill_(evaluations < 5 ? 1 : 0);
      all_reduce(more, ReduceOp::MAX);
    }
    done = true;
    evaluating.join();
    EXPECT_EQ(error, "");
  });
}

TEST(FsdpMisuse, NoSyncIsDecidedByBackwardAndItsSumsGoWithZeroGrad) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Linear net(3, 4), alone(3, 4);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(0.5);
      for (auto& parameter : alone->parameters()) parameter.fill_(0.5);
    }
    FullyShardedDataParallel model(net);
    const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    const auto sum_of = [](auto& of, int of_rank) { return of(batch(of_rank)).square().sum(); };
    // The gradient of one backward of all ranks' mean, as the step shows it.
    ((sum_of(alone, 0) + sum_of(alone, 1)) / 2).backward();
    const auto expected = alone->weight.detach() - 0.1 * alone->weight.grad();

    const auto synchronised = sum_of(model, rank);
    std::optional guard = model.no_sync();
    const auto first = sum_of(model, rank);
    first.backward();
    EXPECT_FALSE(model.parameters()[0].grad().defined());
    EXPECT_FALSE(net->weight.grad().is_meta());
    optimizer->zero_grad();
    EXPECT_FALSE(net->weight.grad().defined());
    guard.reset();
    {
      const auto not_for_this_backward = model.no_sync();
      sum_of(model, rank);
    }
    synchronised.backward();
    optimizer->step();
    EXPECT_TRUE(at::allclose(net->weight, expected));
  });
}

TEST(FsdpMisuse, NormsOfAnyOrderWhereRanksHaveNoRows) {
  run_ranks(3, [](int) {
    auto world = init_process_group();
    nn::Linear net(4, 2);  // rank 2 has no row
    FullyShardedDataParallel model(net);
    const auto infinity = std::numeric_limits<double>::infinity();
    model(torch::tensor({{1.0F, 2.0F, -3.0F, 4.0F}})).sum().backward();
    for (const double order : {infinity, -infinity, -1.0, 0.0, 1.0, 2.0}) {
      const auto norm = model.clip_grad_norm_(1e9, order).item<double>();
      const auto all = torch::tensor({1.0, 2.0, -3.0, 4.0, 1.0, 2.0, -3.0, 4.0, 1.0, 1.0});
      // Of order 0 it is the number of gradients: of the weight and the bias, of which two ranks have rows each.
      const auto expected = order == 0 ? 2.0 : torch::linalg_vector_norm(all, order).item<double>();
      EXPECT_NEAR(norm, expected, 1e-5) << order;
    }
  });
}

TEST(FsdpMisuse, MixedPrecisionLeavesBatchNormsAndIgnoredModules) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    nn::BatchNorm1d ignored(3);
    nn::Sequential both(ignored, net);
    FullyShardedDataParallel model(both, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1),
                                          .mixed_precision = kHalf,
                                          .ignored_modules = {ignored.ptr()}});
    EXPECT_EQ(net->first->weight.scalar_type(), at::kBFloat16);
    EXPECT_EQ(net->offset.scalar_type(), at::kBFloat16);
    for (const auto& norm : {net->norm, ignored}) {
      EXPECT_EQ(norm->weight.scalar_type(), at::kFloat);
      EXPECT_EQ(norm->running_mean.scalar_type(), at::kFloat);
    }
    const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    const auto before = net->norm->bias.detach().clone();
    const auto output = model.forward(batch(rank));
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.to(at::kFloat).square().sum().backward();
    optimizer->step();
    EXPECT_FALSE(at::equal(net->norm->bias, before));
    EXPECT_TRUE(testing::same_everywhere(net->norm->bias.detach()));

    const auto state = model.full_state_dict();
    for (const auto& [name, value] : state) {
      const auto& tensor = value.toTensor();
      EXPECT_EQ(tensor.scalar_type(), tensor.is_floating_point() ? at::kFloat : at::kLong) << name;
    }
    EXPECT_TRUE(at::equal(net->offset, state.at("1.offset").toTensor().to(at::kBFloat16)));
    EXPECT_THAT(message_of<c10::NotImplementedError>([&] {
                  torch::serialize::OutputArchive archive;
                  model.save(archive);
                }),
                HasSubstr("save full_state_dict()"));
  });
}

TEST(FsdpMisuse, GradientsStayInLowPrecisionAndInputsAsTheyAreWhenToldSo) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Linear net(3, 4);
    FullyShardedDataParallel model(net, {.mixed_precision = {.param_dtype = at::kBFloat16,
                                                             .keep_low_precision_grads = true,
                                                             .cast_root_forward_inputs = false}});
    const auto optimizer = model.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.1));
    EXPECT_THROW(model(batch(rank)), c10::Error) << "float times bfloat16";
    const auto before = model.full_state_dict();
    model(batch(rank).to(at::kBFloat16)).square().sum().backward();
    for (const auto& shard : model.parameters()) EXPECT_EQ(shard.grad().scalar_type(), at::kBFloat16);
    model.clip_grad_norm_(1.0);
    optimizer->step();
    const auto after = model.full_state_dict();
    for (const auto& [name, value] : before) {
      EXPECT_EQ(after.at(name).toTensor().scalar_type(), at::kFloat);
      EXPECT_FALSE(at::equal(after.at(name).toTensor(), value.toTensor())) << name;
    }
  });
}

TEST(FsdpMisuse, MixedPrecisionLeavesTheCallersTensorsBehindPointers) {
  struct TakesPointer : nn::Module {
    nn::Linear layer = register_module("layer", nn::Linear(3, 2));
    torch::Tensor forward(const torch::Tensor& own, const std::shared_ptr<torch::Tensor>& behind) {
      EXPECT_EQ(own.scalar_type(), at::kBFloat16);
      return layer(own + behind->to(own.scalar_type()));
    }
  };
  run_ranks(1, [](int rank) {
    auto world = init_process_group();
    FullyShardedDataParallel model(std::make_shared<TakesPointer>(), {.mixed_precision = kHalf});
    const auto behind = std::make_shared<torch::Tensor>(batch(rank));
    model(batch(rank), behind);
    EXPECT_EQ(behind->scalar_type(), at::kFloat);
  });
}

TEST(FsdpMisuse, AModuleWithTwoNamesCountsOnceForThePolicy) {
  struct Part : nn::Module {
    Part() {
      register_parameter("own", torch::zeros(6));
      const nn::Linear twice(2, 2);
      register_module("one", twice);
      register_module("other", twice);
    }
  };
  struct Whole : nn::Module {
    Whole() { register_module("part", std::make_shared<Part>()); }
  };
  const std::vector<fsdp::ParameterGroup> expected{{"part.one", {"part.one.weight", "part.one.bias"}},
                                                   {"part", {"part.own"}}};
  EXPECT_EQ(fsdp::parameter_groups(*std::make_shared<Whole>(), fsdp::size_based_auto_wrap_policy(6)),
            expected);
}

}  // namespace
}  // namespace lockstep::fsdp_misuse_test
