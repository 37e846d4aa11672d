#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/device/device.h>

namespace lockstep::device_test {
namespace {

std::string chosen(int rank, int world_size, int local_rank, int devices) {
  LaunchEnvironment environment;
  environment.rank = rank;
  environment.world_size = world_size;
  environment.local_rank = local_rank;
  return choose_device(environment, devices).str();
}

TEST(Device, IsChosenByLocalRank) {
  EXPECT_EQ(chosen(3, 4, 1, 2), "cuda:1") << "never by RANK";
  EXPECT_EQ(chosen(-1, -1, -1, 1), "cuda:0") << "alone";
  EXPECT_EQ(chosen(0, 2, -1, 0), "cpu");
  EXPECT_THROW(chosen(0, 2, -1, 2), c10::ValueError) << "LOCAL_RANK is unknown";
  EXPECT_THROW(chosen(1, 2, 1, 1), c10::ValueError) << "more processes than devices";
}

TEST(Device, CudaWhereThereIsNoneIsAnError) {
  set_device(c10::Device(c10::kCPU));
  EXPECT_THROW(set_device(c10::Device(c10::kMeta)), c10::ValueError);
  EXPECT_THROW(set_device(c10::Device(c10::kCUDA, 127)), c10::ValueError);
  EXPECT_THROW(set_device(c10::Device(c10::kCUDA)), c10::ValueError) << "no index";
}

}  // namespace
}  // namespace lockstep::device_test
