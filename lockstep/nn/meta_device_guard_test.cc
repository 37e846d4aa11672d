#include <thread>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/meta_device_guard.h>

namespace lockstep::meta_device_guard_test {
namespace {

namespace nn = torch::nn;

/// One of each kind of LibTorch's modules that have tensors, and tensors of its own.
struct NetImpl : nn::Module {
  NetImpl() {
    register_module("linear", nn::Linear(3, 4));
    register_module("convolution", nn::Conv2d(nn::Conv2dOptions(3, 4, 2)));
    register_module("embedding", nn::Embedding(nn::EmbeddingOptions(5, 4).padding_idx(1)));
    register_module("recurrent", nn::LSTM(nn::LSTMOptions(4, 3).num_layers(2).bidirectional(true)));
    register_module("cell", nn::GRUCell(4, 3));
    register_module("norm", nn::BatchNorm2d(4));
    register_module("group_norm", nn::GroupNorm(2, 4));
    register_module("encoder", nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(4, 2)));
    register_parameter("own", torch::randn({2, 3}));
    register_buffer("positions", torch::arange(7));
    register_buffer("mask", torch::ones({3, 3}).tril());
    register_buffer("filled", torch::full({2}, 3.0, torch::kDouble));
  }
};
TORCH_MODULE(Net);

TEST(MetaDeviceGuard, ModulesAreBuiltWithoutMemoryAndWithoutRandomNumbers) {
  torch::manual_seed(3);
  const auto expected = torch::rand({4});
  torch::manual_seed(3);
  Net net = nullptr;
  {
    const MetaDeviceGuard guard;
    net = Net();
  }
  EXPECT_TRUE(at::equal(torch::rand({4}), expected)) << "random numbers were used";
  const Net whole;
  for (const bool parameters : {true, false}) {
    const auto actual = parameters ? net->named_parameters() : net->named_buffers();
    const auto real = parameters ? whole->named_parameters() : whole->named_buffers();
    ASSERT_EQ(actual.size(), real.size());
    for (const auto& item : real) {
      const torch::Tensor* tensor = actual.find(item.key());
      ASSERT_NE(tensor, nullptr) << item.key();
      EXPECT_TRUE(tensor->is_meta()) << item.key();
      EXPECT_EQ(tensor->sizes(), item.value().sizes()) << item.key();
      EXPECT_EQ(tensor->dtype(), item.value().dtype()) << item.key();
      EXPECT_EQ(tensor->requires_grad(), item.value().requires_grad()) << item.key();
    }
  }
}

TEST(MetaDeviceGuard, WhatNamesADeviceOrHasOneStaysWhereItIs) {
  const auto real = torch::ones({2});
  const MetaDeviceGuard guard;
  {
    const MetaDeviceGuard within;
    EXPECT_TRUE(torch::zeros({2}).is_meta());
  }
  EXPECT_TRUE(torch::zeros({2}).is_meta()) << "the outer guard lives";
  EXPECT_TRUE(torch::zeros({2}, torch::kCPU).is_cpu());
  EXPECT_TRUE(at::equal(torch::tensor({1, 2}), torch::tensor({1, 2}))) << "numbers that are given are kept";
  EXPECT_TRUE(torch::zeros_like(real).is_cpu());
  EXPECT_TRUE(at::equal(real + real, torch::full({2}, 2.0, torch::kCPU)));
  bool meta = true;
  std::thread([&] { meta = torch::zeros({2}).is_meta(); }).join();
  EXPECT_FALSE(meta) << "another thread has no guard";
}

TEST(MetaDeviceGuard, AfterTheGuardTensorsHaveValuesAgain) {
  { const MetaDeviceGuard guard; }
  EXPECT_TRUE(at::equal(torch::zeros({2}), torch::zeros({2}, torch::kCPU)));
}

}  // namespace
}  // namespace lockstep::meta_device_guard_test
