// Gradients and their memory that the user keeps: never written over with anything but averages.
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/testing/fixtures.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/ddp/reducer/testing/square_net.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::kept_gradients_test {
namespace {

namespace nn = torch::nn;
using testing::close;
using testing::data;
using testing::expected_gradients;
using testing::has_gradients;
using testing::make_double;
using testing::run_ranks;
using testing::Square;

TEST(KeptGradients, WhatTheUserKeepsIsNotWrittenOver) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Square>(8, 3);
    DistributedDataParallel model(net);
    std::vector<std::pair<torch::Tensor, torch::Tensor>> kept;  // a gradient, its values then
    for (int step = 0; step < 6; ++step) {
      const auto x = data(rank, {8, 8}, step);
      const auto expected = expected_gradients(net, x);
      net->zero_grad();
      model(x).square().sum().backward();
      ASSERT_TRUE(has_gradients(net, expected)) << "step " << step;
      const auto gradient = net->layers_[step % 3]->weight.grad();
      kept.emplace_back(gradient, gradient.clone());
      for (const auto& [tensor, values] : kept) ASSERT_TRUE(at::equal(tensor, values)) << "step " << step;
    }
  });
}

TEST(KeptGradients, BuffersOfTheUserGetTheAverages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const bool static_graph : {false, true}) {
      auto net = make_double<nn::LinearImpl>(4, 3);
      DistributedDataParallel<nn::LinearImpl> model(net, {.static_graph = static_graph});
      auto flat = torch::zeros({15}, at::kDouble);
      net->weight.mutable_grad() = flat.narrow(0, 0, 12).view({3, 4});
      net->bias.mutable_grad() = flat.narrow(0, 12, 3);
      for (int step = 0; step < 5; ++step) {
        flat.zero_();
        model(torch::full({2, 4}, rank + step, at::kDouble)).sum().backward();
        EXPECT_TRUE(at::equal(flat.narrow(0, 0, 12), torch::full({12}, 1.0 + 2 * step, at::kDouble))) << step;
        EXPECT_TRUE(at::equal(flat.narrow(0, 12, 3), torch::full({3}, 2.0, at::kDouble))) << step;
        EXPECT_EQ(net->weight.grad().data_ptr(), flat.data_ptr()) << step;
      }
    }
  });
}

TEST(KeptGradients, MemoryOfTheUserThatNoOtherTensorShowsGetsTheAverages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<nn::LinearImpl>(4, 3);
    DistributedDataParallel<nn::LinearImpl> model(net);
    std::vector<double> memory(12);
    net->weight.mutable_grad() = torch::from_blob(memory.data(), {3, 4}, at::kDouble);
    for (int step = 0; step < 4; ++step) {
      net->zero_grad(/*set_to_none=*/false);
      {
        auto guard = model.no_sync();
        model(torch::full({2, 4}, rank + step, at::kDouble)).sum().backward();
      }
      model(torch::full({2, 4}, rank + step, at::kDouble)).sum().backward();
      EXPECT_EQ(memory, std::vector<double>(12, 2.0 + 4 * step)) << step;
      EXPECT_EQ(net->weight.grad().data_ptr(), memory.data()) << step;
    }
    net->weight.mutable_grad().reset();
  });
}

TEST(KeptGradients, WhatAHookOnAParameterKeepsGetsTheAverages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Square>(8, 2);
    DistributedDataParallel model(net);
    auto kept = std::make_shared<torch::Tensor>();
    net->layers_[0]->weight.register_hook(
        [kept](const torch::Tensor& gradient) { *kept = gradient.detach(); });
    for (int step = 0; step < 5; ++step) {
      const auto x = data(rank, {8, 8}, step);
      const auto expected = expected_gradients(net, x);
      net->zero_grad();
      model(x).square().sum().backward();
      const auto& gradient = net->layers_[0]->weight.grad();
      ASSERT_TRUE(close(gradient, expected[0])) << step;
      EXPECT_EQ(kept->data_ptr(), gradient.data_ptr()) << step << ": autograd has taken it over";
    }
  });
}

TEST(KeptGradients, HandlesOfGradientsThatAreZeroedInPlaceGetTheAverages) {
  // Over the rebuild before the second step; then one gradient in each step is kept and dropped, so that the
  // bucket moves while the others' handles are known.
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Square>(8, 3);
    DistributedDataParallel model(net, {.bucket_cap_mb = 25});
    auto parameters = net->parameters();
    std::vector<torch::Tensor> handles(parameters.size());
    // From step 3 on each new gradient lies in the bucket; when one is dropped again, the bucket moves.
    for (size_t step = 0; step < 3 + 3 * parameters.size(); ++step) {
      const auto x = data(rank, {8, 8}, static_cast<int>(step));
      const auto expected = expected_gradients(net, x);
      net->zero_grad(/*set_to_none=*/false);
      torch::Tensor kept, values;
      if (step >= 3) {
        const size_t dropped = step % parameters.size();
        kept = std::exchange(handles[dropped], {});
        values = kept.clone();
        parameters[dropped].mutable_grad().reset();
      }
      model(x).square().sum().backward();
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (!handles[i].defined()) handles[i] = parameters[i].grad();
        ASSERT_TRUE(close(handles[i], expected[i])) << "step " << step << " parameter " << i;
        ASSERT_EQ(handles[i].data_ptr(), parameters[i].grad().data_ptr())
            << "step " << step << " parameter " << i;
      }
      if (kept.defined()) {
        EXPECT_TRUE(at::equal(kept, values)) << "step " << step;
      }
    }
  });
}

TEST(KeptGradients, AHandleOfASparseGradientGetsTheAverages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Embedding net(nn::EmbeddingOptions(4, 3).sparse(true));
    DistributedDataParallel model(net);
    torch::Tensor handle;
    for (int64_t step = 0; step < 3; ++step) {
      if (handle.defined()) handle.zero_();
      model(torch::full({1}, rank + step, at::kLong)).sum().backward();
      if (!handle.defined()) handle = net->weight.grad();
      auto expected = torch::zeros({4, 3});
      expected.narrow(0, step, 2).fill_(0.5);
      EXPECT_TRUE(at::equal(handle.to_dense(), expected)) << step;
      EXPECT_TRUE(handle.is_same(net->weight.grad())) << step;
    }
  });
}

/// Shared memory that this process has mapped and touched, in MiB; -1 where the system does not tell.
int64_t shared_mebibytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssShmem:", 0) == 0) return std::stoll(line.substr(9)) >> 10;
  }
  return -1;
}

TEST(KeptGradients, ASmallKeptGradientDoesNotHoldItsBucket) {
  if (shared_mebibytes() < 0) GTEST_SKIP() << "/proc/self/status has no RssShmem";
  const auto outcomes = testing::run_ranks_collect(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<Square>(512, 4);  // 4 MiB
    DistributedDataParallel model(net, {.bucket_cap_mb = 25});
    std::vector<torch::Tensor> kept;
    const auto train = [&] {
      net->zero_grad();
      model(data(rank, {4, 512}).to(at::kFloat)).sum().backward();
      const auto& gradient = net->layers_[1]->bias.grad();
      kept.push_back(gradient);
      return gradient.clone();
    };
    std::vector<torch::Tensor> values;
    for (int step = 0; step < 3; ++step) values.push_back(train());
    barrier();
    const auto before = shared_mebibytes();
    for (int step = 0; step < 20; ++step) values.push_back(train());
    barrier();
    EXPECT_LT(shared_mebibytes(), before + 20);  // 160 with both ranks' whole buckets
    for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], values[i])) << "step " << i;
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.exit_status.value_or(-1), 0) << outcome.exception.value_or("") << outcome.output;
    const std::string warning = "memory of the gradient of 'layer1.bias' is still in use";
    const auto first = outcome.output.find(warning);
    ASSERT_NE(first, std::string::npos) << outcome.output;
    EXPECT_EQ(outcome.output.find(warning, first + 1), std::string::npos) << "once";
  }
}

TEST(KeptGradients, GradientsOutliveModelAndGroup) {
  run_ranks(2, [](int rank) {
    torch::Tensor kept, values;
    {
      auto world = init_process_group();
      auto net = make_double<Square>(8, 2);
      DistributedDataParallel model(net);
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        model(data(rank, {5, 8})).sum().backward();
      }
      kept = net->layers_[0]->weight.grad();
      values = kept.clone();
    }
    EXPECT_TRUE(at::equal(kept, values));
    kept.add_(1);
    EXPECT_TRUE(at::equal(kept, values + 1));
  });
}

}  // namespace
}  // namespace lockstep::kept_gradients_test
