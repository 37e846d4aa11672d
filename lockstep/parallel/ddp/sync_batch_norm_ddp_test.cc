#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// DistributedDataParallel over modules with synchronised batch normalisation trains as one process does on
// all batches.
namespace lockstep::sync_batch_norm_ddp_test {
namespace {

namespace nn = torch::nn;
using testing::difference;
using testing::random;
using testing::run_ranks;
using testing::same_everywhere;

template <class Norm>
struct SmallNet : nn::Module {
  SmallNet() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("last", last);
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(norm(first(x)))); }
  nn::Linear first{6, 5};
  Norm norm{5};
  nn::Linear last{5, 2};
};

TEST(SyncBatchNormInDdp, TrainsAsOneProcess) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(3);
    auto net = std::make_shared<SmallNet<SyncBatchNorm>>();
    auto single = std::make_shared<SmallNet<nn::BatchNorm1d>>();
    net->to(at::kDouble);
    single->to(at::kDouble);
    {
      torch::NoGradGuard no_grad;
      for (const auto& item : net->named_parameters())
        single->named_parameters()[item.key()].copy_(item.value());
    }
    DistributedDataParallel<SmallNet<SyncBatchNorm>> model(net);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD single_optimizer(single->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 20; ++step) {
      const auto x = random({12, 6}, step);
      const auto y = random({12, 2}, 1000 + step);
      optimizer.zero_grad();
      single_optimizer.zero_grad();
      torch::mse_loss(model(x.narrow(0, 4 * rank, 4)), y.narrow(0, 4 * rank, 4)).backward();
      torch::mse_loss(single->forward(x), y).backward();
      optimizer.step();
      single_optimizer.step();
    }
    for (const auto& item : net->named_parameters())
      EXPECT_LE(difference(item.value(), single->named_parameters()[item.key()]), 1e-10) << item.key();
    for (const auto& item : net->named_buffers())
      EXPECT_LE(difference(item.value(), single->named_buffers()[item.key()]), 1e-10) << item.key();
    EXPECT_TRUE(same_everywhere(net->first->weight));
  });
}

/// A user's class: its forward calls members of fixed types.
template <class Norm2d, class Norm1d>
struct Net : nn::Module {
  Net() {
    register_module("convolution", convolution), register_module("norm", norm);
    register_module("head", head), register_module("last", last);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last(head->forward(torch::relu(norm(convolution(x))).flatten(1)));
  }
  nn::Conv2d convolution{nn::Conv2dOptions(2, 3, 3)};
  Norm2d norm{3};
  nn::Sequential head = nn::Sequential(nn::Linear(3 * 3 * 3, 4), Norm1d(4), nn::ReLU());
  nn::Linear last{4, 2};
};
using PlainNet = Net<nn::BatchNorm2d, nn::BatchNorm1d>;
using ExplicitNet = Net<SyncBatchNorm, SyncBatchNorm>;

template <class Module>
std::shared_ptr<Module> make(uint64_t seed) {
  torch::manual_seed(seed);
  auto net = std::make_shared<Module>();
  net->to(at::kDouble);
  return net;
}

TEST(SyncBatchNormInDdp, AConvertedClassWithTypedMembersTrainsAsOneProcessAndAsTheExplicitOne) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    auto converted = make<PlainNet>(1);
    auto same = make<ExplicitNet>(1);
    auto single = make<PlainNet>(1);
    EXPECT_EQ(convert_sync_batchnorm(converted), converted);
    DistributedDataParallel<PlainNet> converted_model(converted);
    DistributedDataParallel<ExplicitNet> same_model(same);
    const auto sgd = [](auto& net) {
      return torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    };
    auto converted_optimizer = sgd(converted), same_optimizer = sgd(same), single_optimizer = sgd(single);
    for (int step = 0; step < 10; ++step) {
      const auto x = random({12, 2, 5, 5}, step);
      const auto y = random({12, 2}, 1000 + step);
      const auto train = [&](auto&& forward, auto& optimizer, int64_t begin, int64_t size) {
        optimizer.zero_grad();
        torch::mse_loss(forward(x.narrow(0, begin, size)), y.narrow(0, begin, size)).backward();
        optimizer.step();
      };
      train(converted_model, converted_optimizer, 4 * rank, 4);
      train(same_model, same_optimizer, 4 * rank, 4);
      train([&](const auto& input) { return single->forward(input); }, single_optimizer, 0, 12);
    }
    const auto compare = [&](const auto& mine, const auto& other, double bound) {
      ASSERT_EQ(mine.keys(), other.keys());
      for (const auto& item : mine)
        EXPECT_LE(difference(item.value(), other[item.key()]), bound) << item.key();
    };
    compare(converted->named_parameters(), same->named_parameters(), 0);
    compare(converted->named_buffers(), same->named_buffers(), 0);
    compare(converted->named_parameters(), single->named_parameters(), 1e-10);
    compare(converted->named_buffers(), single->named_buffers(), 1e-10);
    EXPECT_EQ(converted->norm->num_batches_tracked.item<int64_t>(), 10);
    // In eval mode no rank needs the others.
    converted->eval();
    single->eval();
    if (rank == 1) {
      const auto x = random({2, 2, 5, 5}, 5);
      EXPECT_LE(difference(converted->forward(x), single->forward(x)), 1e-10);
    }
  });
}

}  // namespace
}  // namespace lockstep::sync_batch_norm_ddp_test
