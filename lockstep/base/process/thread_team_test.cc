#include <system_error>

#include <gtest/gtest.h>

#include <lockstep/base/process/thread_team.h>
#include <lockstep/testing/memory_bound.h>

namespace lockstep::thread_team_test {
namespace {

TEST(ThreadTeam, ThrowsWhereTheSystemGivesTooFewThreads) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers have their address space without a bound";
#endif
  const testing::MemoryBound bound(100 << 20);  // for the stacks of some of them
  EXPECT_THROW(ThreadTeam(64, "team"), std::system_error);
}

}  // namespace
}  // namespace lockstep::thread_team_test
