#include <thread>

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <lockstep/base/training/held_tensors.h>

namespace lockstep::held_tensors_test {
namespace {

TEST(HeldTensors, AreToldToTheThreadThatHasMadeWhatTells) {
  const at::Tensor weight = at::ones({2});
  {
    const TellingHeldTensors first([&](HeldTensors& held) { held.add(weight); });
    const TellingHeldTensors second([&](HeldTensors& held) { held.optimizer_state.push_back(weight); });
    const HeldTensors held = held_tensors();
    ASSERT_EQ(held.parameters.size(), 1U);
    EXPECT_TRUE(held.parameters[0].is_same(weight));
    ASSERT_EQ(held.gradients.size(), 1U);
    EXPECT_FALSE(held.gradients[0].defined());
    EXPECT_EQ(held.optimizer_state.size(), 1U);
    std::thread([] { EXPECT_TRUE(held_tensors().parameters.empty()); }).join();
  }
  EXPECT_TRUE(held_tensors().parameters.empty()) << "nothing tells any more";
}

}  // namespace
}  // namespace lockstep::held_tensors_test
