// Activation checkpoints on devices: their random numbers are drawn again, too.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::activation_checkpoint_device_test {
namespace {

TEST(ActivationCheckpointOnDevice, GradientsAreThoseWithoutIt) {
  const auto device = testing::test_device(0);
  const auto gradient = [&](bool checkpointed) {
    torch::manual_seed(3);
    const at::Tensor x = torch::arange(1, 65, at::TensorOptions(at::kFloat).device(device)).requires_grad_();
    const auto function = [](const at::Tensor& tensor) {
      return torch::rand_like(tensor) * (tensor * tensor) * torch::rand({64}).to(tensor.device());
    };
    const at::Tensor y = checkpointed ? activation_checkpoint({}, function, x) : function(x);
    const at::Tensor weight = torch::rand_like(x);  // what is drawn after it is as without it, too
    (y * weight).sum().backward();
    return x.grad().cpu();
  };
  const at::Tensor expected = gradient(false);  // by torch's own engine, which has threads for devices then
  EXPECT_TRUE(at::equal(gradient(true), expected));
}

}  // namespace
}  // namespace lockstep::activation_checkpoint_device_test
