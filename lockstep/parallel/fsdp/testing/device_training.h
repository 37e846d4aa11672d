#pragma once

#include <memory>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/testing/training.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/testing/test_device.h>

// What tests of shards on devices train there.
namespace lockstep::fsdp_test {

inline c10::Device own_device() {
  return testing::device_of_rank(get_rank());
}

/// In float32, with buffers.
inline nn::Sequential make_small_net() {
  torch::manual_seed(2);
  nn::Sequential net;
  net->push_back(nn::Linear(3, 5));
  net->push_back(nn::BatchNorm1d(5));
  net->push_back(nn::Linear(5, 2));
  return net;
}

/// What a net has learnt in a few steps in float32.
template <class Model>
StateDict trained(Model& model, int rank, optim::Optimizer& optimizer) {
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto x = testing::random({4, 3}, static_cast<uint64_t>(10 * step + rank), at::kFloat);
    loss_of(model->forward(x)).backward();
    optimizer.step();
  }
  return model->full_state_dict();
}

inline StateDict trained(const FullyShardedDataParallelOptions& options, int rank) {
  const auto model =
      std::make_unique<FullyShardedDataParallel<nn::SequentialImpl>>(make_small_net(), options);
  const auto optimizer = model->make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
  return trained(model, rank, *optimizer);
}

/// As testing::expect_close(), and that the state is on the CPU.
inline void expect_close(const StateDict& actual, const StateDict& expected, double tolerance = 1e-10) {
  for (const auto& [name, value] : actual) EXPECT_TRUE(value.toTensor().is_cpu()) << name;
  testing::expect_close(actual, expected, tolerance);
}

constexpr int kLayers = 8, kWidth = 256;
constexpr int64_t kLayerBytes = int64_t{kWidth} * kWidth * 4;

inline nn::Sequential make_deep_net() {
  nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) {
    net->push_back(nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false)));
  }
  return net;
}

}  // namespace lockstep::fsdp_test
