// FullyShardedDataParallel and modules on devices: it moves them to the CPU, when it is told to.
#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::fsdp_device_test {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::test_device;

torch::nn::Sequential make_net() {
  torch::manual_seed(2);
  torch::nn::Sequential net;
  net->push_back(torch::nn::Linear(3, 5));
  net->push_back(torch::nn::BatchNorm1d(5));
  return net;
}

TEST(FsdpOnDevice, DeviceIdMovesAModuleToTheCpu) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const bool sync : {false, true}) {
      auto on_cpu = make_net(), net = make_net();
      net->to(test_device());
      FullyShardedDataParallel expected(on_cpu);
      FullyShardedDataParallel model(net, {.device_id = at::kCPU, .sync_module_states = sync});
      for (const auto& tensors : {net->parameters(), net->buffers()}) {
        for (const auto& tensor : tensors) EXPECT_TRUE(tensor.is_cpu());
      }
      const auto x = testing::random({4, 3}, static_cast<uint64_t>(rank), at::kFloat);
      for (auto* each : {&expected, &model}) {
        const auto optimizer = each->make_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
        each->forward(x).square().mean().backward();
        optimizer->step();
      }
      const auto state = model.full_state_dict();
      for (const auto& [name, value] : expected.full_state_dict()) {
        EXPECT_TRUE(at::equal(state.at(name).toTensor(), value.toTensor())) << name;
      }
    }
  });
}

TEST(FsdpOnDevice, WeightsOnADeviceAreRefused) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    EXPECT_THAT(message_of<c10::NotImplementedError>(
                    [&] { FullyShardedDataParallel model(make_net(), {.device_id = test_device()}); }),
                HasSubstr("weights that all ranks share lie in the host's memory"));
    auto net = make_net();
    net->to(test_device());
    EXPECT_THAT(message_of<c10::ValueError>([&] { FullyShardedDataParallel model(net); }),
                HasSubstr("parameter '0.weight' is on"));
  });
}

}  // namespace
}  // namespace lockstep::fsdp_device_test
