// The norm of gradients that are sharded over ranks, of which some have none on their device.
#include <limits>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/device/device.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::grad_norm_device_test {
namespace {

TEST(GradNormOnDevice, RanksWithoutGradientsOnTheirDeviceTakePart) {
  testing::run_ranks(3, [](int rank) {
    const c10::Device device = testing::device_of_rank(rank);
    set_device(device);
    auto world = init_process_group();
    const auto first = testing::random({30, 20}, 1), last = testing::random({7}, 2);
    std::vector<torch::Tensor> mine;
    if (rank == 0) mine.push_back(first.to(device));
    if (rank == 2) mine.push_back(last);  // rank 1 has none
    for (const double norm : {2.0, std::numeric_limits<double>::infinity(), -1.0, 0.0}) {
      const double expected = get_total_norm({first, last}, norm).item<double>();
      const auto total = get_total_norm(mine, norm, false, {}, ProcessGroup());
      EXPECT_NEAR(total.item<double>(), expected, 1e-5 * expected) << norm;
      EXPECT_EQ(total.device(), rank == 0 ? device : c10::Device(at::kCPU)) << norm;
    }
  });
}

}  // namespace
}  // namespace lockstep::grad_norm_device_test
