// Autocast, GradScaler and averages of weights where parameters are on a device, or on two.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/optim/autocast.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/swa_utils.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/test_device.h>

namespace {

// The simulated device leaves to others which operations autocast concerns. CUDA has its own list.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

}  // namespace

namespace lockstep::optim_device_test {
namespace {

using testing::run_ranks;
using testing::test_device;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

GradScalerOptions options(std::optional<ProcessGroup> group = {}) {
  return {.device = test_device().type(), .init_scale = 8, .growth_interval = 2, .process_group = group};
}

torch::Tensor parameter(c10::Device device) {
  return torch::ones({3}, device).requires_grad_();
}

void backward(GradScaler& scaler, const torch::Tensor& parameter, double gradient) {
  parameter.mutable_grad().reset();
  scaler.scale((parameter * gradient).sum()).backward();
}

TEST(AutocastOnDevice, ComputesInHalfAndTrainsFloat32Weights) {
  const auto device = test_device();
  torch::manual_seed(1);
  torch::nn::Linear net(8, 1);
  net->to(device);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  GradScaler scaler({.device = device.type(), .init_scale = 1024});
  const auto x = torch::randn({16, 8}).to(device), y = torch::randn({16, 1}).to(device);
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      auto guard = autocast(device.type(), {.dtype = at::kHalf});
      const auto output = net->forward(x);
      EXPECT_EQ(output.scalar_type(), at::kHalf);
      loss = torch::mse_loss(output, y);
      EXPECT_EQ(loss.scalar_type(), at::kFloat);
    }
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  EXPECT_LT(last, 0.9 * first);
  EXPECT_EQ(net->weight.scalar_type(), at::kFloat);
  EXPECT_EQ(net->weight.grad().scalar_type(), at::kFloat);
  EXPECT_FALSE(is_autocast_enabled(device.type()));
}

TEST(GradScalerOnDevice, SkipsAndScalesAsOnTheCpu) {
  const auto run = [](c10::Device device) {
    GradScaler scaler({.device = device.type(), .init_scale = 8, .growth_interval = 2});
    const auto weight = parameter(device);
    torch::optim::SGD optimizer({weight}, 0.5);
    std::vector<double> seen;
    for (const double gradient : {1.0, 2.0, static_cast<double>(kInfinity), 1.0, std::nan(""), 1.0, 3.0}) {
      backward(scaler, weight, gradient);
      scaler.unscale_(optimizer);
      scaler.step(optimizer);
      scaler.update();
      seen.push_back(scaler.get_scale());
      seen.push_back(weight.detach().sum().cpu().item<double>());
    }
    return seen;
  };
  EXPECT_EQ(run(test_device()), run(at::kCPU));
}

TEST(GradScalerOnDevice, TwoDevicesOfOneOptimizerStepTogether) {
  LOCKSTEP_NEEDS_DEVICES(2)
  GradScaler scaler(options());
  const auto one = parameter(test_device(0)), other = parameter(test_device(1));
  torch::optim::SGD optimizer({one, other}, 0.5);
  const auto step = [&](double gradient_of_other) {
    optimizer.zero_grad();
    const auto losses =
        scaler.scale(std::vector{(one * 1.0).sum(), (other * gradient_of_other).sum(), (one * 1.0).sum()});
    EXPECT_EQ(losses[1].device(), test_device(1));
    torch::autograd::backward(losses, {});
    scaler.step(optimizer);
    scaler.update();
  };
  step(kInfinity);
  EXPECT_EQ(scaler.get_scale(), 4);
  EXPECT_TRUE(one.cpu().equal(torch::ones({3}))) << "skipped there, too";
  step(2);
  EXPECT_TRUE(one.cpu().equal(torch::zeros({3}))) << "a gradient of 2, unscaled";
  EXPECT_TRUE(other.cpu().equal(torch::zeros({3})));
}

TEST(GradScalerOnDevice, RanksSkipTogether) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    GradScaler scaler(options(default_group()));
    const auto weight = parameter(test_device());
    torch::optim::SGD optimizer({weight}, 0.5);
    backward(scaler, weight, rank == 1 ? kInfinity : 1);
    scaler.step(optimizer);
    scaler.update();
    EXPECT_TRUE(weight.cpu().equal(torch::ones({3})));
    EXPECT_EQ(scaler.get_scale(), 4);
  });
}

TEST(GradScalerOnDevice, AStateGoesOnThere) {
  GradScaler scaler(options());
  const auto weight = parameter(test_device());
  torch::optim::SGD optimizer({weight}, 0.5);
  backward(scaler, weight, 1);
  scaler.step(optimizer);
  scaler.update();
  const auto state = scaler.state_dict();
  GradScaler other(options());
  other.load_state_dict(state);
  backward(other, weight, 1);
  other.step(optimizer);
  other.update();
  EXPECT_EQ(other.get_scale(), 16) << "the second step without overflow";
  const auto scale = torch::full({1}, 5.0, torch::device(test_device()).dtype(at::kFloat));
  other.update(scale);
  EXPECT_EQ(other.get_scale(), 5);
  EXPECT_THROW(other.update(torch::ones({1})), c10::ValueError) << "on the CPU";
}

TEST(AveragedModelOnDevice, AveragesThere) {
  const auto train = [](c10::Device device) {
    torch::manual_seed(2);
    auto net = std::make_shared<torch::nn::LinearImpl>(3, 2);
    net->to(device);
    swa_utils::AveragedModel average(net);
    const auto start = torch::ones({2, 3}, device);
    for (int step = 1; step <= 4; ++step) {
      const torch::NoGradGuard no_grad;
      net->weight.copy_(start * step);
      average.update_parameters(*net);
    }
    EXPECT_EQ(average.module->parameters()[0].device(), device);
    return average.module->parameters()[0].detach().cpu().clone();
  };
  EXPECT_TRUE(torch::allclose(train(test_device()), train(at::kCPU)));
}

}  // namespace
}  // namespace lockstep::optim_device_test
