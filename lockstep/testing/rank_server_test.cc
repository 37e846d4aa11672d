// Ranks are forked from a program that is loaded already, and are as those that are executed.
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include <lockstep/launch/fork_server.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/rank_server.h>

namespace lockstep::testing::rank_server_test {
namespace {

TEST(RankServer, RanksAreForkedFromALoadedProgram) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ranks are executed under ThreadSanitizer";
#endif
  run_ranks(2, [](int) { EXPECT_NE(launch::forked_arguments(), nullptr); });
}

TEST(RankServer, WhatLibrariesReadWhenTheyAreLoadedIsReadAnew) {
  run_ranks(2,
            [](int) {
              EXPECT_EQ(launch::forked_arguments(), nullptr);
              EXPECT_STREQ(std::getenv("OMP_NUM_THREADS"), "2");
            },
            {.environment = {{"OMP_NUM_THREADS", "2"}}});
}

TEST(RankServer, RanksHaveTheirParentsFolderAndVariables) {
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path("/");
  run_ranks(2,
            [](int rank) {
              EXPECT_EQ(std::filesystem::current_path(), "/");
              EXPECT_STREQ(std::getenv("LOCKSTEP_TEST_VARIABLE"), "here");
              EXPECT_EQ(std::getenv("RANK"), std::to_string(rank));
              EXPECT_STREQ(std::getenv("OMP_NUM_THREADS"), "1");
            },
            {.environment = {{"LOCKSTEP_TEST_VARIABLE", "here"}}});
  std::filesystem::current_path(before);
}

TEST(RankServer, RanksLeadGroupsOfTheirOwnAndHaveNoOtherDescriptors) {
  constexpr const char* kOpen = "LOCKSTEP_TEST_DESCRIPTOR";
  const char* given = std::getenv(kOpen);  // in a rank
  const int open = given != nullptr ? std::stoi(given) : ::open("/dev/null", O_RDONLY);
  ASSERT_GE(open, 3);
  run_ranks(2,
            [&](int) {
              EXPECT_EQ(::getpgid(0), ::getpid());
              EXPECT_EQ(::fcntl(open, F_GETFD), -1) << "inherited " << open;
              struct sigaction action = {};
              ::sigaction(SIGUSR2, nullptr, &action);
              EXPECT_EQ(action.sa_handler, SIG_DFL);
            },
            {.environment = {{kOpen, std::to_string(open)}}});
  ::close(open);
}

TEST(RankServer, RanksAreChildrenWhoseEndIsSeen) {
  const auto outcomes = run_ranks_collect(3, [](int rank) {
    if (rank == 0) ::_exit(7);
    if (rank == 1) ::raise(SIGTERM);
    throw std::runtime_error("of rank 2");
  });
  ASSERT_EQ(outcomes.size(), 3U);
  EXPECT_EQ(outcomes[0].exit_status.value_or(-1), 7);
  EXPECT_EQ(outcomes[1].signal.value_or(0), SIGTERM);
  EXPECT_NE(outcomes[2].exception.value_or("").find("of rank 2"), std::string::npos);
}

TEST(RankServer, IsStartedAnewWhenItHasEnded) {
  run_ranks(1, [](int) {});
  stop_rank_server();
  EXPECT_TRUE(::waitpid(-1, nullptr, WNOHANG) == -1 && errno == ECHILD) << "a process is left";
  run_ranks(1, [](int) {});
}

}  // namespace
}  // namespace lockstep::testing::rank_server_test
