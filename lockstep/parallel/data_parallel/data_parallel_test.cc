// DataParallel computes what the module alone does, and follows its changes.
#include <cstdint>
#include <gmock/gmock.h>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/data_parallel/data_parallel.h>
#include <lockstep/parallel/data_parallel/testing/fixtures.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::data_parallel_test {
namespace {

namespace nn = torch::nn;
using testing::calling;
using testing::Cnn;
using testing::copy_of;
using testing::expect_close;
using testing::expect_same_gradients;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Nested;
using testing::random;
using testing::weighted_sum;
using torch::Tensor;

TEST(DataParallel, ComputesWhatTheFullBatchGives) {
  for (const int64_t replicas : {2, 3, 4}) {
    for (const int64_t batch : {8, 7, 5, 3, 2, 1, 0}) {
      SCOPED_TRACE(std::to_string(replicas) + " replicas, batch of " + std::to_string(batch));
      auto net = std::make_shared<Nested>();
      auto alone = copy_of(net);
      DataParallel model(net, DataParallelOptions{.num_replicas = replicas});
      std::vector<Tensor> mine, others;
      for (auto* inputs : {&mine, &others}) {
        *inputs = {random({batch, 6}, 1).requires_grad_(), random({batch, 5}, 2).requires_grad_(),
                   random({batch, 1}, 3)};
      }
      const auto run = [](auto& module, const std::vector<Tensor>& x) {
        return module.forward(x[0], std::pair(x[1], x[2]), 1.5, std::string("name"));
      };
      const auto output = run(model, mine);
      const auto expected = run(*alone, others);
      expect_close(std::get<0>(output), std::get<0>(expected));
      ASSERT_EQ(std::get<1>(output).size(), 2U);
      for (size_t i = 0; i < 2; ++i) expect_close(std::get<1>(output)[i], std::get<1>(expected)[i]);
      expect_close(std::get<2>(output).at("name").first, std::get<2>(expected).at("name").first);
      EXPECT_EQ(std::get<2>(output).at("name").second, 3);
      weighted_sum(output).backward();
      weighted_sum(expected).backward();
      expect_same_gradients(*net, *alone);
      EXPECT_FALSE(net->unused.grad().defined());
      for (size_t i = 0; i < mine.size(); ++i) expect_close(mine[i].grad(), others[i].grad());
    }
  }
}

TEST(DataParallel, TrainsAsTheModuleAloneAndTheSameEveryTime) {
  std::vector<std::vector<Tensor>> runs;
  for (int run = 0; run < 2; ++run) {
    torch::manual_seed(1);
    auto net = std::make_shared<Nested>();
    auto alone = copy_of(net);
    DataParallel model(net, DataParallelOptions{.num_replicas = 3});
    torch::optim::Adam optimizer(model.parameters(), 1e-2);
    torch::optim::Adam of_alone(alone->parameters(), 1e-2);
    for (int step = 0; step < 20; ++step) {
      const auto x = random({10, 6}, step);
      const auto more = std::pair(random({10, 5}, step + 50), random({10, 1}, step + 90));
      optimizer.zero_grad(), of_alone.zero_grad();
      weighted_sum(model(x, more, 0.5, "a")).backward();
      weighted_sum(alone->forward(x, more, 0.5, "a")).backward();
      optimizer.step(), of_alone.step();
    }
    runs.emplace_back();
    const auto expected = alone->named_parameters();
    for (const auto& item : net->named_parameters()) {
      expect_close(item.value(), expected[item.key()], item.key());
      runs.back().push_back(item.value());
    }
  }
  for (size_t i = 0; i < runs[0].size(); ++i) EXPECT_TRUE(torch::equal(runs[0][i], runs[1][i]));
}

TEST(DataParallel, MakesItsReplicasOnce) {
  auto net = std::make_shared<Nested>();
  Nested::made = 0;
  DataParallel model(net, DataParallelOptions{.num_replicas = 4});
  torch::optim::SGD optimizer(model.parameters(), 1e-3);
  for (int step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    const auto output = model(random({8, 6}, step), std::pair(random({8, 5}), random({8, 1})), 1.0, "a");
    std::get<0>(output).sum().backward();
    optimizer.step();
  }
  EXPECT_EQ(Nested::made, 4);
  EXPECT_EQ(model.replicas_made(), 4);
  model.replicate();
  EXPECT_EQ(Nested::made, 8);
}

TEST(DataParallel, ReplicasShareTheParametersMemory) {
  std::mutex mutex;
  std::set<const void*> memory;
  std::set<at::TensorImpl*> tensors;
  auto net = calling([&](const Tensor& x, const Tensor& weight) {
    const std::lock_guard<std::mutex> lock(mutex);
    memory.insert(weight.const_data_ptr()), tensors.insert(weight.unsafeGetTensorImpl());
    return x * weight;
  });
  DataParallel model(net, DataParallelOptions{.num_replicas = 3});
  model(random({3, 3}));
  EXPECT_EQ(memory, std::set<const void*>{net->weight.const_data_ptr()});
  EXPECT_EQ(tensors.size(), 3U);
}

TEST(DataParallel, LeavesTheDefaultGeneratorAlone) {
  auto net = std::make_shared<Nested>();
  torch::manual_seed(5);
  const auto expected = torch::rand({3});
  torch::manual_seed(5);
  DataParallel model(net, DataParallelOptions{.num_replicas = 2});
  EXPECT_TRUE(torch::equal(torch::rand({3}), expected));
}

TEST(DataParallel, FollowsToLoadAndInPlaceChanges) {
  Cnn cnn;
  cnn->eval();
  DataParallel model(cnn, {.num_replicas = 2});
  const auto x = random({5, 1, 6, 6});
  const auto check = [&](const Tensor& input, const std::string& what) {
    const auto output = model(input);
    const auto expected = cnn->forward(input);
    EXPECT_EQ(output.dtype(), expected.dtype());
    EXPECT_TRUE(torch::allclose(output, expected)) << what;
  };
  check(x, "at first");
  {
    torch::NoGradGuard no_grad;
    cnn->last->weight.mul_(3);
    cnn->norm->running_mean.add_(0.5);
  }
  check(x, "changed in place");
  std::stringstream file;
  torch::save(Cnn(), file);
  torch::load(cnn, file);
  check(x, "loaded");
  cnn->to(torch::kFloat);
  check(x.to(torch::kFloat), "float");
  cnn->to(torch::kDouble);
  cnn->last->weight.set_data(random({4, 48}, 9));
  check(x, "other memory");
  EXPECT_EQ(model.replicas_made(), 2);
}

TEST(DataParallel, FollowsTrainingModeAndKeepsTheFirstReplicasBuffers) {
  Cnn cnn, first;
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < cnn->parameters().size(); ++i) first->parameters()[i].copy_(cnn->parameters()[i]);
  }
  DataParallel model(cnn, {.num_replicas = 2});
  for (int step = 0; step < 3; ++step) {
    const auto x = random({7, 1, 6, 6}, step);
    const auto y = model(x);
    first->forward(x.narrow(0, 0, 4));  // the first chunk of seven
    expect_close(cnn->norm->running_mean, first->norm->running_mean);
    expect_close(cnn->norm->running_var, first->norm->running_var);
    EXPECT_EQ(cnn->norm->num_batches_tracked.item<int64_t>(), step + 1);
    expect_close(y.narrow(0, 0, 4), first->forward(x.narrow(0, 0, 4)));
    first->norm->running_mean.copy_(cnn->norm->running_mean);
    first->norm->running_var.copy_(cnn->norm->running_var);
  }
  model.eval();
  const auto x = random({7, 1, 6, 6}, 8);
  expect_close(model(x), cnn->forward(x), "all replicas have the first one's statistics");
  model.train();
  cnn->norm->eval();
  const auto before = cnn->norm->running_mean.clone();
  expect_close(model(x), cnn->forward(x), "a submodule in another mode");
  EXPECT_TRUE(torch::equal(cnn->norm->running_mean, before));
}

TEST(DataParallel, FollowsRequiresGradAndNewSubmodules) {
  nn::Sequential layers({{"one", nn::Linear(3, 3)}, {"two", nn::Linear(3, 3)}});
  layers->to(torch::kDouble);
  DataParallel model(layers, {.num_replicas = 2});
  const auto x = random({4, 3});
  layers->parameters()[0].set_requires_grad(false);
  model(x).sum().backward();
  EXPECT_FALSE(layers->parameters()[0].grad().defined());
  EXPECT_TRUE(layers->parameters()[2].grad().defined());
  layers->push_back(nn::Tanh());
  expect_close(model(x), layers->forward(x));
  EXPECT_EQ(model.replicas_made(), 4);
}

TEST(DataParallel, RecordsNothingWithoutGradients) {
  Cnn cnn;
  DataParallel model(cnn, {.num_replicas = 2});
  model.eval();
  const auto x = random({4, 1, 6, 6});
  {
    torch::NoGradGuard no_grad;
    const auto y = model(x);
    EXPECT_FALSE(y.requires_grad());
    expect_close(y, cnn->forward(x));
  }
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(model(x).is_inference());
  }
  EXPECT_TRUE(model(x).requires_grad());
}

TEST(DataParallel, FollowsOnCudaDevices) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a CUDA device";
  // Two replicas on one device do what replicas on two devices do, but for the copies between them.
  const auto last = static_cast<at::DeviceIndex>(torch::cuda::device_count() - 1);
  const at::Device first(at::kCUDA, 0), second(at::kCUDA, last);
  auto net = std::make_shared<Nested>();
  net->to(first);
  auto alone = copy_of(net);
  DataParallel model(net, DataParallelOptions{.device_ids = {first, second}});
  torch::optim::SGD optimizer(model.parameters(), 1e-2), of_alone(alone->parameters(), 1e-2);
  for (int step = 0; step < 5; ++step) {
    const auto x = random({7, 6}, step).to(first);
    const auto more = std::pair(random({7, 5}, step).to(first), random({7, 1}, step).to(first));
    optimizer.zero_grad(), of_alone.zero_grad();
    const auto sum_of = [](const auto& output) { return std::get<0>(output).pow(2).sum(); };
    sum_of(model(x, more, 0.5, "a")).backward();
    sum_of(alone->forward(x, more, 0.5, "a")).backward();
    expect_same_gradients(*net, *alone);
    optimizer.step(), of_alone.step();
  }
  net->to(at::kCPU);
  EXPECT_THAT(message_of<c10::Error>([&] {
                model(random({4, 6}), std::pair(random({4, 5}), random({4, 1})), 1.0, "a");
              }),
              HasSubstr("on device cuda:0 (device_ids[0])"));
}

}  // namespace
}  // namespace lockstep::data_parallel_test
