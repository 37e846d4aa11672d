#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/collectives/kernels/cpu_capability.h>
#include <lockstep/collectives/kernels/reduce_kernels.h>
#include <lockstep/collectives/kernels/testing/capabilities.h>

namespace lockstep::cpu_capability_test {
namespace {

// The variable is read once a process, so each value needs a process of its own.
[[noreturn]] void report_capability(const char* wanted) {
  ::setenv("LOCKSTEP_CPU_CAPABILITY", wanted, 1);
  try {
    std::fprintf(stderr, "capability %s", to_string(cpu_capability()));
    const bool same = &reduce_kernels(at::kHalf, ReduceOperation::kSum) ==
                      &reduce_kernels_for(to_string(cpu_capability()), at::kHalf, ReduceOperation::kSum);
    std::_Exit(same ? 0 : 1);
  } catch (const c10::ValueError& error) {
    std::fprintf(stderr, "%s", error.what_without_backtrace());
    std::_Exit(2);
  }
}

TEST(CpuCapabilityDeathTest, TheEnvironmentChoosesTheKernels) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const std::vector<CpuCapability> have = testing::capabilities();
  EXPECT_EXIT(report_capability(""), ::testing::ExitedWithCode(0),
              std::string("capability ") + to_string(have.back()));
  for (const auto capability : {CpuCapability::kDefault, CpuCapability::kAvx2, CpuCapability::kAvx512}) {
    const char* const name = to_string(capability);
    if (std::find(have.begin(), have.end(), capability) != have.end()) {
      EXPECT_EXIT(report_capability(name), ::testing::ExitedWithCode(0), std::string("capability ") + name);
    } else {
      EXPECT_EXIT(report_capability(name), ::testing::ExitedWithCode(2), "this machine does not have");
    }
  }
  EXPECT_EXIT(report_capability("sse9"), ::testing::ExitedWithCode(2),
              "LOCKSTEP_CPU_CAPABILITY.*'sse9'.*default");
}

}  // namespace
}  // namespace lockstep::cpu_capability_test
