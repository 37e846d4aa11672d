#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include <lockstep/device/nvidia_devices.h>
#include <lockstep/testing/folder_test.h>

namespace lockstep::nvidia_devices_test {
namespace {

namespace fs = std::filesystem;

using NvidiaDeviceNodes = testing::FolderTest;

TEST_F(NvidiaDeviceNodes, OfEveryKindAreLookedFor) {
  const fs::path& folder = folder_;
  EXPECT_FALSE(has_nvidia_driver_node(folder));
  EXPECT_FALSE(has_nvidia_driver_node(folder / "nowhere"));
  for (const char* node : {"nvidiactl", "dxg", "nvhost-gpu"}) {
    std::ofstream(folder / node).close();
    EXPECT_TRUE(has_nvidia_driver_node(folder)) << node;
    fs::remove(folder / node);
  }
  std::ofstream(folder / "nvidia-caps").close();
  EXPECT_FALSE(has_nvidia_driver_node(folder)) << "not the driver's own node";
}

TEST_F(NvidiaDeviceNodes, OfCardsAreCounted) {
  EXPECT_EQ(count_nvidia_cards(folder_ / "nowhere"), 0);
  for (const char* node : {"nvidia", "nvidiactl", "nvidia-uvm", "nvidia-caps", "dxg"})
    std::ofstream(folder_ / node).close();
  EXPECT_EQ(count_nvidia_cards(folder_), 0);
  for (const char* node : {"nvidia0", "nvidia11"}) std::ofstream(folder_ / node).close();
  EXPECT_EQ(count_nvidia_cards(folder_), 2);
}

TEST(CudaVisibleDevices, AreReadAsTheDriverDoes) {
  for (const char* list : {"", " ", "-1", " -1", "-1,0", "NoDevFiles"})
    EXPECT_EQ(count_visible_devices(list), 0) << list;
  for (const char* list : {"0", " 3", "0,-1", "GPU-8a5c", "MIG-1", "1,,0", "0,NoDevFiles"})
    EXPECT_EQ(count_visible_devices(list), 1) << list;
  EXPECT_EQ(count_visible_devices("1, 0"), 2);
  EXPECT_EQ(count_visible_devices("2,GPU-8a5c,0"), 3);
}

}  // namespace
}  // namespace lockstep::nvidia_devices_test
