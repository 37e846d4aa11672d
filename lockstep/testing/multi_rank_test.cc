#include <cstdlib>
#include <gmock/gmock.h>
#include <iostream>
#include <signal.h>
#include <stdexcept>
#include <thread>
#include <unistd.h>

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <lockstep/testing/multi_rank.h>

namespace lockstep::testing::multi_rank_test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

TEST(RunRanks, RunsTheBodyInProcessesOfItsOwn) {
  const std::string parent = std::to_string(::getpid());
  run_ranks(3, [](int rank) {
    EXPECT_EQ(std::getenv("RANK"), std::to_string(rank));
    EXPECT_STREQ(std::getenv("WORLD_SIZE"), "3");
    EXPECT_STREQ(std::getenv("OMP_NUM_THREADS"), "1");
  });
  auto outcomes = run_ranks_collect(
      2, [](int rank) { std::cout << "rank " << rank << " of " << ::getppid() << std::endl; });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(outcomes[static_cast<size_t>(rank)].exit_status, 0);
    EXPECT_THAT(outcomes[static_cast<size_t>(rank)].output,
                HasSubstr("rank " + std::to_string(rank) + " of " + parent));
  }
}

TEST(RunRanks, SeveralCallsInOneTestAreToldApart) {
  for (const char* word : {"first", "second", "third"}) {
    auto outcomes = run_ranks_collect(1, [&](int) { std::cout << "body " << word << std::endl; });
    EXPECT_THAT(outcomes[0].output, HasSubstr(std::string("body ") + word));
  }
}

TEST(RunRanks, AFailedAssertionFailsTheTestWithItsMessage) {
  EXPECT_NONFATAL_FAILURE(
      run_ranks(2, [](int rank) { EXPECT_EQ(rank, 0) << "this is rank " << rank; }, {.deadline = 30s}),
      "this is rank 1");
  EXPECT_NONFATAL_FAILURE(
      run_ranks(1, [](int) { std::thread([] { ADD_FAILURE() << "in a thread"; }).join(); }), "in a thread");
}

TEST(RunRanks, AnExceptionOrASignalFailsTheTestAndEndsTheOthers) {
  EXPECT_NONFATAL_FAILURE(run_ranks(2,
                                    [](int rank) {
                                      if (rank == 1) throw std::runtime_error("boom");
                                      ::pause();
                                    }),
                          "std::runtime_error: boom");
  EXPECT_NONFATAL_FAILURE(run_ranks(2,
                                    [](int rank) {
                                      if (rank == 0) ::raise(SIGKILL);
                                      ::pause();
                                    }),
                          "process 0 terminated with signal SIGKILL");
}

TEST(RunRanks, ADeadlineKillsAndNamesWhoStillRan) {
  EXPECT_NONFATAL_FAILURE(run_ranks(2,
                                    [](int rank) {
                                      if (rank == 1) ::pause();
                                    },
                                    {.deadline = 3s}),
                          "were killed: 1");
}

TEST(RunRanks, ExpectedFailuresAreNone) {
  run_ranks(2,
            [](int rank) {
              if (rank == 0) ::raise(SIGKILL);
            },
            {.expected_failures = {0}});
}

TEST(RunRanksCollect, TellsHowEachRankEndedAndEndsNone) {
  const auto outcomes = run_ranks_collect(5, [](int rank) {
    switch (rank) {
      case 0:
        ::raise(SIGUSR1);
        break;
      case 1:
        ::_exit(7);
      case 2:
        throw std::logic_error("wrong");
      case 3:
        ADD_FAILURE() << "an assertion";
        break;
      default:
        std::cerr << "well" << std::endl;
    }
  });
  EXPECT_EQ(outcomes[0].signal, SIGUSR1);
  EXPECT_FALSE(outcomes[0].exit_status);
  EXPECT_EQ(outcomes[1].exit_status, 7);
  EXPECT_FALSE(outcomes[1].exception);
  EXPECT_EQ(outcomes[2].exit_status, 1);
  EXPECT_EQ(outcomes[2].exception, "std::logic_error: wrong");
  EXPECT_EQ(outcomes[3].exit_status, 1);
  EXPECT_THAT(outcomes[3].exception.value_or(""), HasSubstr("an assertion"));
  EXPECT_EQ(outcomes[4].exit_status, 0);
  EXPECT_THAT(outcomes[4].output, HasSubstr("well"));
  for (const auto& outcome : outcomes) EXPECT_FALSE(outcome.timed_out);
}

TEST(RunRanksCollect, MarksTheRanksThatTheDeadlineKilled) {
  const auto outcomes = run_ranks_collect(2,
                                          [](int rank) {
                                            if (rank == 1) ::raise(SIGSTOP);
                                          },
                                          {.deadline = 3s, .expected_failures = {1}});
  EXPECT_EQ(outcomes[0].exit_status, 0);
  EXPECT_TRUE(outcomes[1].timed_out);
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
}

TEST(RunSurvivors, FailsForAVictimThatLivesAndForASurvivorThatThrows) {
  run_survivors(2, {0}, [](int rank) {
    if (rank == 0) die();
  });
  run_survivors(1, {0}, [](int) {
    die_after(1ms);
    ::pause();
  });
  EXPECT_NONFATAL_FAILURE(run_survivors(2, {0}, [](int) {}), "rank 0: no exception");
  EXPECT_NONFATAL_FAILURE(run_survivors(2, {0},
                                        [](int rank) {
                                          if (rank == 0) die();
                                          throw std::runtime_error("boom");
                                        }),
                          "rank 1: std::runtime_error: boom");
}

class Parametrised : public ::testing::TestWithParam<int> {};
TEST_P(Parametrised, RunsItsOwnParameterOnly) {
  const int parameter = GetParam();
  run_ranks(1, [&](int) { EXPECT_EQ(parameter, GetParam()); });
}
INSTANTIATE_TEST_SUITE_P(Numbers, Parametrised, ::testing::Values(3, 4));

}  // namespace
}  // namespace lockstep::testing::multi_rank_test
