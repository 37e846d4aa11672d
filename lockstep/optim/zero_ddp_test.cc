#include <algorithm>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/ddp/distributed_data_parallel.h>
#include <lockstep/optim/zero_hook.h>
#include <lockstep/testing/multi_rank.h>

// The sharded optimizer together with DistributedDataParallel: overlapped with it, and in a Join beside it.
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

/// One process that does what `ranks` ranks do; rank r has the first counts[r] inputs.
std::vector<torch::Tensor> expected_after(const std::vector<int>& counts) {
  auto net = make_net();
  optim::AdamW plain(net->parameters(), optim::AdamWOptions(0.01));
  for (int step = 0; step < *std::max_element(counts.begin(), counts.end()); ++step) {
    plain.zero_grad();
    for (size_t rank = 0; rank < counts.size(); ++rank) {
      if (step >= counts[rank]) continue;
      (net->forward(inputs(step, static_cast<int>(rank))).square().sum() / static_cast<double>(counts.size()))
          .backward();
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
    auto net = make_net();
    DistributedDataParallel<Net> model(net, kSmallBuckets);
    ZeroRedundancyOptimizer zero(model.parameters(),
                                 optimizer_class<optim::AdamW>(optim::AdamWOptions(0.01)));
    {
      Join join({&model, &zero});
      for (int step = 0; step < 3 + 2 * rank; ++step) {
        zero.zero_grad();
        model(inputs(step, rank)).square().sum().backward();
        zero.step();
      }
    }
    expect_equal(net->parameters(), expected_after({3, 5, 7}));
  });
}

}  // namespace
}  // namespace lockstep::zero_ddp_test
