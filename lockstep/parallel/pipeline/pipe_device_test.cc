// Pipe over devices: as the module alone on one device, and in the order of the caller's streams.
#include <gmock/gmock.h>
#include <vector>

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/pipeline/balance.h>
#include <lockstep/parallel/pipeline/pipe.h>
#include <lockstep/parallel/pipeline/testing/pipe_fixtures.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::pipe_device_test {
namespace {

namespace nn = torch::nn;
using testing::equal;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::message_of;
using testing::on_cpu;
using testing::on_micro_batches;
using testing::random;
using testing::test_device;
using torch::Tensor;

/// Draws from its device's generator.
struct NoiseImpl : nn::Module {
  Tensor forward(const Tensor& x) { return x * torch::rand_like(x); }
};
TORCH_MODULE(Noise);

nn::Sequential net_of(bool with_batch_norm = true, bool with_noise = false) {
  torch::manual_seed(4);
  nn::Sequential net{nn::Linear(6, 5), nn::Tanh()};
  if (with_noise) net->push_back(Noise());
  if (!with_noise) net->push_back(nn::Identity());
  if (with_batch_norm) net->push_back(nn::BatchNorm1d(5));
  if (!with_batch_norm) net->push_back(nn::LayerNorm(nn::LayerNormOptions({5})));
  net->push_back(nn::Linear(5, 2));
  net->to(at::kDouble);
  return net;
}

/// Parameters and buffers after some steps.
template <class Forward>
std::vector<Tensor> train(const nn::Sequential& net, c10::Device first, c10::Device last,
                          const Forward& forward) {
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    auto x = random({8, 6}, static_cast<uint64_t>(step)).to(first).requires_grad_();
    optimizer.zero_grad();
    const auto y = forward(x);
    EXPECT_EQ(y.device(), last);
    loss_of(y).backward();
    EXPECT_EQ(x.grad().device(), first);
    optimizer.step();
  }
  auto state = on_cpu(net->parameters());
  for (const auto& buffer : on_cpu(net->buffers())) state.push_back(buffer);
  return state;
}

TEST(PipeOnDevice, TrainsAsTheModuleAlone) {
  LOCKSTEP_NEEDS_DEVICES(2);
  for (const auto checkpoint : {PipeCheckpoint::kNever, PipeCheckpoint::kAlways}) {
    const bool with_batch_norm = checkpoint == PipeCheckpoint::kNever;  // it counts what is computed again
    auto alone = net_of(with_batch_norm);
    alone->to(test_device(0));
    const auto expected = train(alone, test_device(0), test_device(0),
                                [&](const Tensor& x) { return on_micro_batches(alone, x, 3); });
    for (const auto& devices :
         std::vector<std::vector<at::Device>>{{test_device(0), test_device(1)},
                                              {test_device(1), test_device(0), test_device(1)},
                                              {test_device(0), test_device(0)}}) {
      auto net = net_of(with_batch_norm);
      Pipe pipe(net, devices.size() == 2 ? std::vector<int64_t>{2, 3} : std::vector<int64_t>{1, 2, 2},
                {.devices = devices, .chunks = 3, .checkpoint = checkpoint});
      EXPECT_EQ(net->parameters()[0].device(), devices.front());
      const auto actual =
          train(net, devices.front(), devices.back(), [&](const Tensor& x) { return pipe(x); });
      EXPECT_TRUE(equal(actual, expected)) << devices << ' ' << static_cast<int>(checkpoint);
    }
  }
}

TEST(PipeOnDevice, TakesABatchFromTheHostAndTheDevicesThatThereAre) {
  LOCKSTEP_NEEDS_DEVICES(2);
  auto net = net_of();
  Pipe pipe(net, {2, 3}, {.chunks = 2});
  EXPECT_EQ(pipe.devices(), (std::vector<at::Device>{test_device(0), test_device(1)}));
  pipe.eval();
  const auto y = pipe(random({4, 6}));
  EXPECT_EQ(y.device(), test_device(1));
  auto alone = net_of();
  alone->eval();
  EXPECT_TRUE(torch::allclose(y.cpu(), alone->forward(random({4, 6}))));
}

TEST(PipeOnDevice, DrawsTheSameRandomNumbersAgain) {
  LOCKSTEP_NEEDS_DEVICES(2);
  const auto gradients = [](PipeCheckpoint checkpoint, at::Device last) {
    auto net = net_of(/*with_batch_norm=*/false, /*with_noise=*/true);
    Pipe pipe(net, {2, 3}, {.devices = {test_device(0), last}, .chunks = 3, .checkpoint = checkpoint});
    torch::manual_seed(6);
    loss_of(pipe(random({8, 6}))).backward();
    return on_cpu(gradients_of(*net));
  };
  const auto kept = gradients(PipeCheckpoint::kNever, test_device(1));
  EXPECT_TRUE(equal(gradients(PipeCheckpoint::kAlways, test_device(1)), kept));
  EXPECT_TRUE(equal(gradients(PipeCheckpoint::kExceptLast, test_device(1)), kept));
  EXPECT_THAT(message_of<c10::Error>([&] { gradients(PipeCheckpoint::kAlways, test_device(0)); }),
              HasSubstr("set checkpoint to kNever"));
}

TEST(PipeOnDevice, FollowsTheCallersStreams) {
  LOCKSTEP_NEEDS_DEVICES(2);
  auto net = net_of();
  Pipe pipe(net, {2, 3}, {.devices = {test_device(0), test_device(1)}, .chunks = 2});
  pipe.eval();
  const auto values = random({4, 6}).pin_memory();
  auto x = torch::zeros({4, 6}, torch::TensorOptions(test_device(0)).dtype(at::kDouble));
  const auto expected = pipe(values.to(test_device(0))).cpu();
  const auto stream = testing::other_stream(test_device(0));
  testing::synchronize(test_device(0));
  testing::Gate gate;
  testing::enqueue(stream, [&] { gate.wait(); });
  Tensor y;
  {
    const c10::StreamGuard guard(stream);
    x.copy_(values, /*non_blocking=*/true);  // not yet
    gate.open();
    y = pipe(x).cpu();
  }
  EXPECT_TRUE(torch::equal(y, expected));
}

TEST(PipeOnDevice, RefusesDevicesAndModulesThatAreElsewhere) {
  LOCKSTEP_NEEDS_DEVICES(2);
  auto net = net_of();
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                Pipe pipe(net, {2, 3}, {.devices = {test_device(0), test_device(99)}});
              }),
              HasSubstr("the number of visible devices is"));
  Pipe pipe(net, {2, 3}, {.devices = {test_device(0), test_device(1)}});
  pipe.to(test_device(0));
  EXPECT_THAT(message_of<c10::Error>([&] { pipe(random({4, 6})); }), HasSubstr("make a new Pipe after to()"));
  const nn::Linear tied(3, 3);
  nn::Sequential twice(tied, tied);
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                Pipe model(twice, {1, 1}, {.devices = {test_device(0), test_device(1)}});
              }),
              HasSubstr("a parameter of shape [3, 3] is in partition 0"));
}

TEST(PipeOnDevice, BalancesWhereTheLayersAre) {
  auto net = net_of();
  net->to(test_device());
  EXPECT_EQ(balance_by_time(2, net, random({4, 6}).to(test_device()), {.timeout = {}}).size(), 2);
}

}  // namespace
}  // namespace lockstep::pipe_device_test
