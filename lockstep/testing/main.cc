#include <cstdio>
#include <cstdlib>

#include <gtest/gtest.h>

#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/rank_server.h>

int main(int argc, char** argv) {
  lockstep::testing::start_as_rank_or_return(argc, argv);
  ::testing::InitGoogleTest(&argc, argv);
  if (std::getenv("LOCKSTEP_TEST_HOSTS") != nullptr && !lockstep::testing::has_wire()) {
    std::puts("skipped: tests over several hosts need UCX, and can't run under ThreadSanitizer");
    return 77;  // ctest's SKIP_RETURN_CODE
  }
  return RUN_ALL_TESTS();
}
