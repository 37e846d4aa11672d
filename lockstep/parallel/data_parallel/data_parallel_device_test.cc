// DataParallel over devices: as the module alone, and in the order of the caller's streams.
#include <gmock/gmock.h>
#include <utility>

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/data_parallel/data_parallel.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::data_parallel_device_test {
namespace {

namespace nn = torch::nn;
using testing::Gate;
using testing::message_of;
using testing::test_device;

struct Mlp : nn::Cloneable<Mlp> {
  Mlp() { reset(); }
  void reset() override {
    first = register_module("first", nn::Linear(6, 5));
    last = register_module("last", nn::Linear(5, 2));
    to(at::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    if (gate != nullptr && x.device() == test_device(0)) {
      seen = x.clone();  // in the stream's order, and not yet
      gate->open();
    }
    return last(torch::tanh(first(x)));
  }
  nn::Linear first{nullptr}, last{nullptr};
  static inline Gate* gate = nullptr;
  static inline torch::Tensor seen;
};

/// Parameters after some steps, by the module itself or by replicas of it.
template <class Forward>
std::vector<torch::Tensor> train(Mlp& net, c10::Device device, const Forward& forward) {
  torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
    auto x = at::randn({7, 6}, generator, at::kDouble).to(device);
    optimizer.zero_grad();
    const auto y = forward(x);
    EXPECT_EQ(y.device(), device);
    y.square().sum().backward();
    optimizer.step();
  }
  std::vector<torch::Tensor> state;
  for (const auto& parameter : net.parameters()) state.push_back(parameter.detach().cpu());
  return state;
}

TEST(DataParallelOnDevice, TrainsAsTheModuleAlone) {
  LOCKSTEP_NEEDS_DEVICES(2);
  const std::vector<at::Device> devices{test_device(0), test_device(1)};
  torch::manual_seed(4);
  auto alone = std::make_shared<Mlp>();
  const auto expected = train(*alone, at::kCPU, [&](const auto& x) { return alone->forward(x); });
  torch::manual_seed(4);
  auto net = std::make_shared<Mlp>();
  net->to(devices[0]);
  DataParallel model(net, {.device_ids = devices});
  EXPECT_EQ(model.output_device(), devices[0]);
  const auto actual = train(*net, devices[0], [&](const auto& x) { return model(x); });
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-10, 1e-12)) << actual[i] << expected[i];
  }
}

TEST(DataParallelOnDevice, GathersOnTheOutputDevice) {
  LOCKSTEP_NEEDS_DEVICES(2);
  auto net = std::make_shared<Mlp>();
  net->to(test_device(0));
  DataParallel model(net, {.device_ids = {test_device(0), test_device(1)}, .output_device = test_device(1)});
  const auto x = torch::randn({4, 6}, at::kDouble);
  const auto y = model(x.to(test_device(0)));
  EXPECT_EQ(y.device(), test_device(1));
  EXPECT_TRUE(at::allclose(y.cpu(), net->forward(x.to(test_device(0))).cpu()));
}

TEST(DataParallelOnDevice, FollowsTheCallersStreams) {
  LOCKSTEP_NEEDS_DEVICES(2);
  auto net = std::make_shared<Mlp>();
  net->to(test_device(0));
  DataParallel model(net, {.device_ids = {test_device(0), test_device(1)}});
  auto values = torch::randn({4, 6}, at::kDouble).pin_memory();
  auto x = torch::zeros({4, 6}, torch::TensorOptions(test_device(0)).dtype(at::kDouble));
  const auto expected = net->forward(values.to(test_device(0))).cpu();
  const auto stream = testing::other_stream(test_device(0));
  testing::synchronize(test_device(0));
  Gate gate;
  testing::enqueue(stream, [&] { gate.wait(); });
  Mlp::gate = &gate;
  torch::Tensor y;
  {
    const c10::StreamGuard guard(stream);
    x.copy_(values, /*non_blocking=*/true);  // not yet
    y = model(x);
    y = y.cpu();
  }
  Mlp::gate = nullptr;
  EXPECT_TRUE(at::allclose(y, expected));
  EXPECT_TRUE(at::equal(std::exchange(Mlp::seen, {}).cpu(), values.narrow(0, 0, 2)));
}

TEST(DataParallelOnDevice, RefusesDevicesThatDoNotExist) {
  auto net = std::make_shared<Mlp>();
  net->to(test_device(0));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                DataParallel model(net, {.device_ids = {test_device(0), test_device(99)}});
              }),
              ::testing::HasSubstr("the number of visible devices is"));
}

}  // namespace
}  // namespace lockstep::data_parallel_device_test
