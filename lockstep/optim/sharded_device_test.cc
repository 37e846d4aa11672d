// ZeroRedundancyOptimizer and model averaging with parameters on devices: the same numbers as on the CPU.
#include <gmock/gmock.h>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/optim/model_averaging.h>
#include <lockstep/optim/optimizer_state_dict.h>
#include <lockstep/optim/post_local_sgd_optimizer.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::sharded_device_test {
namespace {

namespace nn = torch::nn;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::run_ranks;

torch::Tensor random(int rank, int step, c10::Device device) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(10 * step + rank));
  return at::randn({4, 6}, generator, at::kFloat).to(device);
}

nn::Sequential make_net(c10::Device device) {
  torch::manual_seed(2);
  nn::Sequential net(nn::Linear(6, 5), nn::Tanh(), nn::Linear(5, 2));
  net->to(device);
  return net;
}

std::vector<torch::Tensor> train_sharded(c10::Device device, int rank, bool bucket_views) {
  auto net = make_net(device);
  DistributedDataParallel model(net);
  ZeroRedundancyOptimizer optimizer(net->parameters(),
                                    optimizer_class<torch::optim::Adam>(torch::optim::AdamOptions(1e-2)),
                                    {.parameters_as_bucket_view = bucket_views});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model(random(rank, step, device)).square().mean().backward();
    optimizer.step();
    if (step > 0) continue;
    // The other rank's state comes from another device.
    optimizer.consolidate_state_dict(/*to=*/0);
    if (rank != 0) continue;
    std::stringstream stream;
    torch::save(optimizer, stream);
    torch::load(optimizer, stream, device);
  }
  return testing::on_cpu(net->parameters());
}

std::vector<torch::Tensor> train_averaged(c10::Device device, int rank) {
  auto net = make_net(device);
  auto local = std::make_unique<torch::optim::SGD>(net->parameters(), 0.1);
  PostLocalSGDOptimizer optimizer(std::move(local), std::make_shared<PeriodicModelAverager>(2));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    net->forward(random(rank, step, device)).square().mean().backward();
    optimizer.step();
  }
  return testing::on_cpu(net->parameters());
}

TEST(ShardedOptimizersOnDevice, StepAsOnTheCpu) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto device = testing::device_of_rank(rank);
    for (const bool views : {false, true}) {
      expect_equal(train_sharded(device, rank, views), train_sharded(at::kCPU, rank, views));
    }
    expect_equal(train_averaged(device, rank), train_averaged(at::kCPU, rank));
  });
}

TEST(ShardedOptimizersOnDevice, TakeParametersOnSeveralDevicesUnlessAsBucketViews) {
  LOCKSTEP_NEEDS_DEVICES(2);
  run_ranks(1, [](int) {
    auto world = init_process_group();
    const auto on = [](int device) {
      return torch::ones({3}, testing::test_device(device)).requires_grad_();
    };
    const std::vector<torch::Tensor> parameters{on(0), on(1)};
    const auto adam = optimizer_class<torch::optim::Adam>(torch::optim::AdamOptions(0.1));
    const auto text = testing::message_of<c10::ValueError>(
        [&] { ZeroRedundancyOptimizer optimizer(parameters, adam, {.parameters_as_bucket_view = true}); });
    EXPECT_THAT(text,
                HasSubstr("on " + parameters[0].device().str() + " and " + parameters[1].device().str()));
    EXPECT_THAT(text, HasSubstr("leave parameters_as_bucket_view out"));
    ZeroRedundancyOptimizer optimizer(parameters, adam);
    for (const auto& parameter : parameters) parameter.sum().backward();
    optimizer.step();
    optimizer.consolidate_state_dict();
    const auto state = state_dict(optimizer).at("state").toGenericDict();
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(parameters[i].device(), testing::test_device(i));
      const auto of_parameter = state.at(static_cast<int64_t>(i)).toGenericDict();
      EXPECT_EQ(of_parameter.at("exp_avg").toTensor().device(), testing::test_device(i));
      EXPECT_NEAR(parameters[i].sum().item<float>(), 2.7, 1e-5);
    }
    const std::vector<torch::Tensor> first{parameters[0]}, second{parameters[1]};
    ZeroRedundancyOptimizer growing(first, adam, {.parameters_as_bucket_view = true});
    EXPECT_THROW(growing.add_param_group(torch::optim::OptimizerParamGroup(second)), c10::ValueError);
  });
}

}  // namespace
}  // namespace lockstep::sharded_device_test
