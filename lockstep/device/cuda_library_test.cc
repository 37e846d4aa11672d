#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include <lockstep/device/cuda_library.h>
#include <lockstep/device/device.h>
#include <lockstep/testing/folder_test.h>

namespace lockstep::cuda_library_test {
namespace {

namespace fs = std::filesystem;

using CudaDeviceNodes = testing::FolderTest;

TEST_F(CudaDeviceNodes, OfEveryKindAreLookedFor) {
  const fs::path& folder = folder_;
  EXPECT_FALSE(cuda_loading::has_device_node(folder));
  EXPECT_FALSE(cuda_loading::has_device_node(folder / "nowhere"));
  for (const char* node : {"nvidiactl", "dxg", "nvhost-gpu"}) {
    std::ofstream(folder / node).close();
    EXPECT_TRUE(cuda_loading::has_device_node(folder)) << node;
    fs::remove(folder / node);
  }
  std::ofstream(folder / "nvidia-caps").close();
  EXPECT_FALSE(cuda_loading::has_device_node(folder)) << "not the driver's own node";
}

TEST(CudaLibrary, ReadsVisibleDevicesAsTheDriverDoes) {
  EXPECT_FALSE(cuda_loading::hides_all(nullptr));
  for (const char* list : {"", " ", "-1", " -1", "-1,0", "NoDevFiles"})
    EXPECT_TRUE(cuda_loading::hides_all(list)) << list;
  for (const char* list : {"0", "1,0", "0,-1", "GPU-8a5c", "MIG-1"})
    EXPECT_FALSE(cuda_loading::hides_all(list)) << list;
}

TEST(CudaLibrary, ACardIsNamedByWhoKnowsIt) {
  const c10::Device device(c10::kHPU, 3);  // a kind that nobody else tells about
  EXPECT_EQ(card_identity(device), "");
  set_card_identity(c10::kHPU, [](c10::DeviceIndex index) { return "card " + std::to_string(index); });
  EXPECT_EQ(card_identity(device), "card 3");
  set_card_identity(c10::kHPU, nullptr);
  EXPECT_EQ(card_identity(device), "");
}

}  // namespace
}  // namespace lockstep::cuda_library_test
