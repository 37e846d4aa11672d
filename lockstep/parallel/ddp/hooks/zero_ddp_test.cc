#include <algorithm>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/ddp/hooks/zero_hook.h>
#include <lockstep/testing/multi_rank.h>

// The sharded optimizer together with DistributedDataParallel: after it, overlapped with it, and in a Join beside it.
namespace lockstep::zero_ddp_test {
namespace {

namespace optim = torch::optim;
using testing::run_ranks;

struct Net : torch::nn::Module {
  Net() {
    register_module("first", first), register_module("second", second), register_module("third", third);
  }
  torch::Tensor forward(const torch::Tensor& x) { return third(torch::tanh(second(torch::tanh(first(x))))); }
  torch::nn::Linear first{6, 20};
  torch::nn::Linear second{20, 12};
  torch::nn::Linear third{12, 3};
};

std::shared_ptr<Net> make_net() {
  torch::manual_seed(3);
  auto net = std::make_shared<Net>();
  net->to(at::kDouble);
  return net;
}

torch::Tensor inputs(int step, int rank) {
  return at::randn({4, 6}, at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 * step + rank)),
                   at::kDouble);
}

const DistributedDataParallelOptions kSmallBuckets{.bucket_cap_mb = 1e-3, .first_bucket_cap_mb = 1e-4};

/// One process that does what the ranks do; rank r has the first counts[r] inputs. Gradients are divided by
/// the number of ranks, or by the number of those that still have inputs.
std::vector<torch::Tensor> expected_after(const std::vector<int>& counts, bool by_initial_world_size = true) {
  auto net = make_net();
  optim::AdamW plain(net->parameters(), optim::AdamWOptions(0.01));
  for (int step = 0; step < *std::max_element(counts.begin(), counts.end()); ++step) {
    plain.zero_grad();
    const auto training =
        std::count_if(counts.begin(), counts.end(), [&](int count) { return step < count; });
    const auto divisor = static_cast<double>(by_initial_world_size ? std::ssize(counts) : training);
    for (size_t rank = 0; rank < counts.size(); ++rank) {
      if (step >= counts[rank]) continue;
      (net->forward(inputs(step, static_cast<int>(rank))).square().sum() / divisor).backward();
    }
    plain.step();
  }
  return net->parameters();
}

void expect_equal(const std::vector<torch::Tensor>& actual, const std::vector<torch::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-10, 1e-12)) << i;
  }
}

HookFuture average(int, GradBucket& bucket) {
  bucket.buffer().div_(get_world_size());
  return all_reduce(bucket.buffer(), ReduceOp::SUM, {}, /*async_op=*/true)->getFuture();
}

template <class MakeHook>
void expect_plain_steps_while_overlapping(MakeHook make_hook) {
  auto net = make_net();
  DistributedDataParallel<Net> model(net, kSmallBuckets);
  ZeroRedundancyOptimizer zero(model.parameters(), optimizer_class<optim::AdamW>(optim::AdamWOptions(0.01)),
                               {.overlap_with_ddp = true});
  model.register_comm_hook(0, make_hook(average, zero));
  for (int step = 0; step < 8; ++step) {
    zero.zero_grad();
    model(inputs(step, get_rank())).square().sum().backward();
  }
  EXPECT_GT(model.reducer().bucket_bytes().size(), 2u);
  expect_equal(net->parameters(), expected_after(std::vector<int>(static_cast<size_t>(get_world_size()), 8)));
}

TEST(ZeroWithDdp, StepsAfterBackwardAsThePlainOptimizerDoes) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    auto net = make_net();
    DistributedDataParallel<Net> model(net, kSmallBuckets);
    ZeroRedundancyOptimizer zero(model.parameters(), optimizer_class<optim::AdamW>(optim::AdamWOptions(0.01)),
                                 {.parameters_as_bucket_view = true});
    for (int step = 0; step < 8; ++step) {
      zero.zero_grad();
      model(inputs(step, rank)).square().sum().backward();
      zero.step();
    }
    expect_equal(net->parameters(), expected_after({8, 8, 8}));
  });
}

TEST(ZeroWithDdp, StepsWithinBackward) {
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [](int) {
      auto world = init_process_group();
      expect_plain_steps_while_overlapping(
          [](auto hook, auto& zero) { return hook_with_zero_step(hook, zero); });
      expect_plain_steps_while_overlapping(
          [](auto hook, auto& zero) { return hook_with_zero_step_interleaved(hook, zero); });
    });
  }
}

TEST(ZeroWithDdp, JoinsBesideTheModel) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (const bool by_initial_world_size : {true, false}) {
      auto net = make_net();
      DistributedDataParallel<Net> model(net, kSmallBuckets);
      ZeroRedundancyOptimizer zero(model.parameters(),
                                   optimizer_class<optim::AdamW>(optim::AdamWOptions(0.01)));
      {
        Join join({&model, &zero}, {.divide_by_initial_world_size = by_initial_world_size});
        for (int step = 0; step < 3 + 2 * rank; ++step) {
          zero.zero_grad();
          model(inputs(step, rank)).square().sum().backward();
          zero.step();
        }
      }
      expect_equal(net->parameters(), expected_after({3, 5, 7}, by_initial_world_size));
    }
  });
}

TEST(ZeroWithDdp, RanksWithoutInputsLeaveParametersThatNoRankUsesAlone) {
  struct Partial : torch::nn::Module {
    Partial() { register_module("used", used), register_module("unused", unused); }
    torch::Tensor forward(const torch::Tensor& x) { return used(x); }
    torch::nn::Linear used{2, 1}, unused{2, 2};
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<Partial>();
    DistributedDataParallel<Partial> model(net, {.find_unused_parameters = true});
    // Rank 0, which is the first without inputs, owns the largest parameter, an unused one.
    ZeroRedundancyOptimizer zero(model.parameters(),
                                 optimizer_class<optim::AdamW>(optim::AdamWOptions(0.1).weight_decay(0.5)));
    const auto weight = net->unused->weight.clone(), bias = net->unused->bias.clone();
    {
      Join join({&model, &zero});
      for (int step = 0; step < 1 + 2 * rank; ++step) {
        zero.zero_grad();
        model(torch::ones({1, 2})).sum().backward();
        zero.step();
      }
    }
    EXPECT_FALSE(net->unused->weight.grad().defined());
    EXPECT_TRUE(at::equal(net->unused->weight, weight));
    EXPECT_TRUE(at::equal(net->unused->bias, bias));
  });
}

TEST(ZeroWithDdp, RanksWithoutInputsDoNotStepByAnOldGradient) {
  struct Sometimes : torch::nn::Module {
    Sometimes() { register_module("always", always), register_module("first", first); }
    torch::Tensor forward(const torch::Tensor& x, bool is_first) {
      const auto y = always(x).sum();
      return is_first ? y + first(x).sum() : y;
    }
    torch::nn::Linear always{2, 1}, first{2, 2};
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const bool in_users_memory : {false, true}) {
      auto net = std::make_shared<Sometimes>();
      const auto gradient = torch::zeros({2, 2});
      if (in_users_memory) net->first->weight.mutable_grad() = gradient;
      DistributedDataParallel<Sometimes> model(net, {.find_unused_parameters = true});
      // Rank 0, which is the first without inputs, owns the largest parameter.
      ZeroRedundancyOptimizer zero(model.parameters(), optimizer_class<optim::SGD>(optim::SGDOptions(1.0)));
      const auto expected = net->first->weight.detach() - 1;
      {
        Join join({&model, &zero});
        for (int step = 0; step < 1 + 2 * rank; ++step) {
          zero.zero_grad(/*set_to_none=*/!in_users_memory);
          model(torch::ones({1, 2}), step == 0).backward();
          zero.step();
        }
      }
      EXPECT_TRUE(at::allclose(net->first->weight, expected)) << in_users_memory;
      if (in_users_memory) {
        EXPECT_EQ(net->first->weight.grad().data_ptr(), gradient.data_ptr());
      }
    }
  });
}

TEST(ZeroWithDdp, RanksWithoutInputsStepWithTheTrainingRanksAverage) {
  // Each gradient is 1 and so is its mean over the ranks that train, so each of the three steps takes 1 away.
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::nn::Linear net(1, 1);
    auto gradients = torch::zeros({2});
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.zero_();
    }
    net->weight.mutable_grad() = gradients.narrow(0, 0, 1).view({1, 1});
    net->bias.mutable_grad() = gradients.narrow(0, 1, 1);
    DistributedDataParallel model(net);
    ZeroRedundancyOptimizer zero(net->parameters(), optimizer_class<optim::SGD>(optim::SGDOptions(1.0)));
    {
      Join join({&model, &zero}, {.divide_by_initial_world_size = false});
      for (int step = 0; step < 1 + 2 * rank; ++step) {
        gradients.zero_();
        model(torch::ones({1, 1})).sum().backward();
        zero.step();
      }
    }
    EXPECT_EQ(net->weight.item<float>(), -3);
    EXPECT_EQ(net->bias.item<float>(), -3);
    EXPECT_TRUE(at::equal(gradients, torch::ones({2}))) << "also on the rank that only took part";
  });
}

}  // namespace
}  // namespace lockstep::zero_ddp_test
