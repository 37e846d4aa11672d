#include <dlfcn.h>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/monitor/nvml.h>
#include <lockstep/monitor/testing/fake_nvml.h>

namespace lockstep::monitor::nvml_test {
namespace {

using testing::FakeNvml;

// Of nvml.h's nvmlReturn_t.
constexpr int kNotSupported = 3;
constexpr int kNoPermission = 4;
constexpr int kInsufficientSize = 7;
constexpr int kGpuIsLost = 15;
constexpr int kUnknown = 999;
constexpr unsigned long long kNotAvailable = ~0ULL;

constexpr const char* kProcesses = "nvmlDeviceGetComputeRunningProcesses_v2";

/// The fake library is the one that has NVIDIA's name in this process, for the loader finds by its name what is loaded.
class NvmlOnAFake : public ::testing::Test {
 protected:
  void SetUp() override {
    library_ = ::dlopen(LOCKSTEP_FAKE_NVML, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << ::dlerror();
    fake_ = static_cast<FakeNvml*>(::dlsym(library_, "fake_nvml"));
    ASSERT_NE(fake_, nullptr) << ::dlerror();
    *fake_ = {};
  }
  void TearDown() override { ::dlclose(library_); }
  void fail(const std::string& function, int card, int error) { fake_->errors[{function, card}] = error; }
  /// What a program that begins now sees.
  std::vector<Card> cards() {
    const auto nvml = Nvml::load();
    return nvml ? nvml->cards() : std::vector<Card>{};
  }

  void* library_ = nullptr;
  FakeNvml* fake_ = nullptr;
};

TEST_F(NvmlOnAFake, TellsOfCardsAndTheirProcesses) {
  fake_->processes = {{7, 3ULL << 30}, {8, kNotAvailable}};
  {
    const auto nvml = Nvml::load();
    ASSERT_NE(nvml, nullptr);
    const auto cards = nvml->cards();
    ASSERT_EQ(cards.size(), 2U);
    EXPECT_EQ(cards[0].name, "Card 0");
    EXPECT_EQ(cards[0].used_percent, 97);
    EXPECT_EQ(cards[0].memory_used, 5);
    EXPECT_EQ(cards[0].memory_total, 80LL << 30);
    ASSERT_EQ(cards[0].processes.size(), 2U);
    EXPECT_EQ(cards[0].processes[0].pid, 7);
    EXPECT_EQ(cards[0].processes[0].memory, 3LL << 30);
    EXPECT_EQ(cards[0].processes[1].pid, 8);
    EXPECT_EQ(cards[0].processes[1].memory, std::nullopt);
    EXPECT_EQ(cards[1].index, 1);
    EXPECT_TRUE(cards[1].processes.empty());
    EXPECT_EQ(fake_->calls["nvmlShutdown"], 0);
  }
  EXPECT_EQ(fake_->calls["nvmlInit_v2"], 1);
  EXPECT_EQ(fake_->calls["nvmlShutdown"], 1);
  EXPECT_EQ(fake_->calls["nvmlDeviceGetComputeRunningProcesses_v3"], 0)
      << "some drivers write more under this name than it says";
}

TEST_F(NvmlOnAFake, HasRoomForAsManyProcessesAsThereAre) {
  for (unsigned int pid = 1; pid <= 1000; ++pid) fake_->processes.push_back({pid, pid});
  const auto found = cards().at(0).processes;
  ASSERT_EQ(found.size(), 1000U);
  EXPECT_EQ(found.back().pid, 1000);
  EXPECT_EQ(found.back().memory, 1000);
}

TEST_F(NvmlOnAFake, AddsUpWhatAProcessHasInSeveralPartsOfACard) {
  fake_->processes = {{7, 1}, {8, kNotAvailable}, {7, 2}, {7, kNotAvailable}, {8, kNotAvailable}};
  const auto found = cards().at(0).processes;
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].memory, 3);
  EXPECT_EQ(found[1].memory, std::nullopt);
}

TEST_F(NvmlOnAFake, IsNothingWhereTheDriverDoesNotWork) {
  for (int error = 1; error <= 30; ++error) {
    fail("nvmlInit_v2", -1, error);
    EXPECT_EQ(Nvml::load(), nullptr) << error;
  }
  EXPECT_EQ(fake_->calls["nvmlShutdown"], 0) << "what has not begun does not end";
}

TEST_F(NvmlOnAFake, LeavesOutWhatTheDriverDoesNotTell) {
  fake_->processes = {{7, 1}};
  for (const int error : {kNotSupported, kNoPermission, kInsufficientSize, kGpuIsLost, kUnknown}) {
    fake_->errors.clear();
    fail("nvmlDeviceGetCount_v2", -1, error);
    EXPECT_TRUE(cards().empty()) << error;

    fake_->errors.clear();
    fail("nvmlDeviceGetHandleByIndex_v2", 0, error);
    auto found = cards();
    ASSERT_EQ(found.size(), 1U) << error;
    EXPECT_EQ(found[0].index, 1) << "the other one keeps its number";

    fake_->errors.clear();
    for (const char* function :
         {"nvmlDeviceGetName", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo", kProcesses}) {
      fail(function, 0, error);
    }
    found = cards();
    ASSERT_EQ(found.size(), 2U) << error;
    EXPECT_EQ(found[0].name, "");
    EXPECT_EQ(found[0].used_percent, std::nullopt);
    EXPECT_EQ(found[0].memory_total, std::nullopt);
    EXPECT_TRUE(found[0].processes.empty());
    EXPECT_EQ(found[1].name, "Card 1");
    EXPECT_EQ(found[1].memory_total, 80LL << 30);
  }
}

}  // namespace
}  // namespace lockstep::monitor::nvml_test
