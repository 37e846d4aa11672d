#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/device/device.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/test_device.h>

// What groups make of the devices that their ranks have chosen. device_agreement_test.cc has the decisions.
namespace lockstep::card_sharing_device_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::run_ranks_collect;
using testing::test_device;

/// Takes the device; the simulation's has no identity of its own.
void choose(int index) {
  const at::Device device = test_device(index);
  if (testing::test_device_is_simulated()) {
    set_card_identity(device.type(), [](c10::DeviceIndex i) { return "SIM-" + std::to_string(i); });
  }
  set_device(device);
  ASSERT_EQ(chosen_device(), device);
}

TEST(CardSharingOnDevice, RanksOnOneCardAreWarnedByNameAndWork) {
  const auto outcomes = run_ranks_collect(3, [](int rank) {
    choose(0);
    auto world = init_process_group();
    EXPECT_EQ(get_backend(), "lockstep");
    EXPECT_EQ(get_backend_config(), "cpu:lockstep,cuda:lockstep");
    at::Tensor tensor = at::full({4}, rank + 1, at::TensorOptions().device(test_device(0)));
    all_reduce(tensor);
    EXPECT_EQ(tensor[3].item<float>(), 6);
  });
  const auto warned =
      AllOf(HasSubstr("ranks 0-2 share the card "), HasSubstr("start one rank for each card"));
  EXPECT_THAT(outcomes[0].output, warned);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(outcomes[rank].exit_status, 0) << outcomes[rank].exception.value_or(outcomes[rank].output);
    if (rank > 0) {
      EXPECT_THAT(outcomes[rank].output, Not(warned)) << "once is enough";
    }
  }
}

TEST(CardSharingOnDevice, NcclIsRefusedToRanksThatShareACard) {
  const auto outcomes = run_ranks_collect(2, [](int) {
    choose(0);
    EXPECT_THAT(message_of<c10::ValueError>([] { auto world = init_process_group({.backend = "nccl"}); }),
                HasSubstr("backend 'nccl' can't be used: "));
    EXPECT_FALSE(is_initialized());
  });
  for (const auto& outcome : outcomes)
    EXPECT_EQ(outcome.exit_status, 0) << outcome.exception.value_or(outcome.output);
}

TEST(CardSharingOnDevice, ACardForEachRankIsNoReasonToWarn) {
  LOCKSTEP_NEEDS_DEVICES(2);
  const auto outcomes = run_ranks_collect(2, [](int rank) {
    choose(rank);
    auto world = init_process_group();
    at::Tensor tensor = at::ones({4}, at::TensorOptions().device(test_device(rank)));
    all_reduce(tensor);
    EXPECT_EQ(tensor[3].item<float>(), 2);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.exit_status, 0) << outcome.exception.value_or(outcome.output);
    EXPECT_THAT(outcome.output, Not(HasSubstr("share the card")));
  }
}

TEST(CardSharingOnDevice, AGroupForTheCpuAloneRefusesDeviceTensors) {
  const auto outcomes = run_ranks_collect(2, [](int rank) {
    auto world = init_process_group({.backend = "cpu:lockstep"});
    const at::Tensor on_device = at::ones({4}, at::TensorOptions().device(test_device(0)));
    const at::Tensor on_cpu = at::ones({4});
    EXPECT_THAT(
        message_of<c10::ValueError>([&] { all_reduce(on_device); }),
        AllOf(HasSubstr("process group 'default' has no backend for "), HasSubstr("only cpu:lockstep")));
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  all_gather({on_cpu, on_cpu}, on_device);
                }),
                HasSubstr("has no backend for "))
        << "the input counts";
    EXPECT_THAT(message_of<c10::ValueError>([&] { all_reduce(at::ones({1}, at::kMeta)); }),
                HasSubstr("no backend for meta tensors"));
    all_reduce(on_cpu);
    EXPECT_EQ(on_cpu[0].item<float>(), 2) << "rank " << rank;
  });
  for (const auto& outcome : outcomes)
    EXPECT_EQ(outcome.exit_status, 0) << outcome.exception.value_or(outcome.output);
}

}  // namespace
}  // namespace lockstep::card_sharing_device_test
