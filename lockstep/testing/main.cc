#include <gtest/gtest.h>

#include <lockstep/testing/rank_server.h>

int main(int argc, char** argv) {
  lockstep::testing::start_as_rank_or_return(argc, argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
