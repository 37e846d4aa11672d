#include <gtest/gtest.h>

#include <lockstep/device/cuda_library.h>
#include <lockstep/device/device.h>

namespace lockstep::cuda_library_test {
namespace {

TEST(CudaLibrary, ACardIsNamedByWhoKnowsIt) {
  const c10::Device device(c10::kHPU, 3);  // a kind that no other test tells about
  EXPECT_EQ(card_identity(device), "");
  set_card_identity(c10::kHPU, [](c10::DeviceIndex index) { return "card " + std::to_string(index); });
  EXPECT_EQ(card_identity(device), "card 3");
  set_card_identity(c10::kHPU, nullptr);
  EXPECT_EQ(card_identity(device), "");
}

}  // namespace
}  // namespace lockstep::cuda_library_test
