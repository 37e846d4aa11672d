// SyncBatchNorm on devices: as on the CPU, also where BatchNorm modules are converted.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>
#include <lockstep/nn/testing/fixtures.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::sync_batch_norm_device_test {
namespace {

using testing::close;
using testing::data;
using testing::run_ranks;

/// Output, gradients and running statistics of a batch normalisation over all ranks.
std::vector<torch::Tensor> run(c10::Device device, int rank, bool converted) {
  auto x = data(rank, {3 + rank, 4, 5}).to(device).requires_grad_();
  torch::Tensor y;
  std::vector<torch::Tensor> state;
  const auto use = [&](auto& norm) {
    norm->to(device, at::kDouble);
    if (converted) convert_sync_batchnorm_(*norm);
    y = norm->forward(x);
    (y * data(5 + rank, {3 + rank, 4, 5}).to(device)).sum().backward();
    state = {norm->weight.grad(), norm->bias.grad(), norm->running_mean, norm->running_var};
  };
  if (converted) {
    torch::nn::BatchNorm1d norm(4);
    use(norm);
  } else {
    SyncBatchNorm norm(4);
    use(norm);
  }
  EXPECT_EQ(y.device(), device);
  state.push_back(y), state.push_back(x.grad());
  for (auto& tensor : state) tensor = tensor.detach().cpu();
  return state;
}

TEST(SyncBatchNormOnDevice, NormalisesAsOnTheCpu) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const bool converted : {false, true}) {
      const auto expected = run(at::kCPU, rank, converted);
      const auto actual = run(testing::device_of_rank(rank), rank, converted);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(close(actual[i], expected[i], 1e-10)) << i << "\n" << actual[i] << expected[i];
      }
      // Not what this rank's values alone give.
      EXPECT_GT(expected[4].mean({0, 2}).abs().max().item<double>(), 1e-3);
    }
  });
}

}  // namespace
}  // namespace lockstep::sync_batch_norm_device_test
