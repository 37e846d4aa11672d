#include <chrono>
#include <csignal>
#include <fstream>
#include <gmock/gmock.h>
#include <regex>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/testing/random_cases.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>

// A rank ends while the ranks meet: each of the others says which one and how, long before the timeout. Where it is
// stopped they say so at the timeout.
namespace lockstep::init_death_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using testing::expect_survivors;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks_collect;
using testing::run_survivors;

/// A failpoint, at a pass of it. Each init_process_group() holds four exchanges: that all are there, where
/// they are, that all are connected, and where their first group lies.
struct Place {
  const char* failpoint;
  int pass;
};

void PrintTo(const Place& place, std::ostream* out) {
  *out << place.failpoint << "@" << place.pass;
}

/// Whether a rank comes there: it connects to lower ranks, and higher ones connect to it.
bool passes(const Place& place, int rank, int ranks) {
  const std::string name = place.failpoint;
  if (name == "peer_connected") return rank > 0;
  if (name == "hello_received" || name == "peer_accepted") return rank < ranks - 1;
  return true;
}

void kill_there(const Place& place, int victim, int ranks) {
  SCOPED_TRACE("rank " + std::to_string(victim) + " of " + std::to_string(ranks));
  run_survivors(
      ranks, {victim},
      [&](int rank) {
        if (rank == victim) {
          failpoint::configure(std::string(place.failpoint) + "=kill(9)@" + std::to_string(place.pass));
        }
        const auto text = message_of<c10::Error>([] { auto world = init_process_group({.timeout = 5min}); });
        for (int other = 0; other < ranks; ++other) {
          const std::regex named("rank " + std::to_string(other) + R"( \(pid [0-9]+\) )");
          EXPECT_EQ(std::regex_search(text, named), other == victim) << text;
        }
        EXPECT_THAT(text, HasSubstr(") killed by signal 9"));
      },
      {.deadline = 40s});
}

class DeathInInit : public ::testing::TestWithParam<Place> {};

TEST_P(DeathInInit, IsNamedByAllOthers) {
  kill_there(GetParam(), 1, 3);
}

TEST_P(DeathInInit, OfAnyRankOfSeveralIsNamedByAllOthers) {
  if (!testing::long_run()) GTEST_SKIP() << "a long test: set LOCKSTEP_TEST_ALL";
  for (int ranks = 2; ranks <= 5; ++ranks) {
    for (int victim = 0; victim < ranks; ++victim) {
      if (passes(GetParam(), victim, ranks)) kill_there(GetParam(), victim, ranks);
    }
  }
}

const std::vector<Place> kPlaces = {
    {"meet_claimed", 1},   {"meet_published", 1},  {"meet_counted", 1},   {"meet_met", 1},
    {"meet_claimed", 2},   {"meet_published", 2},  {"meet_counted", 2},   {"meet_met", 2},
    {"peer_connected", 1}, {"peers_connected", 1}, {"hello_received", 1}, {"peer_accepted", 1},
    {"meet_claimed", 3},   {"meet_counted", 3},    {"meet_met", 3},       {"transport_connected", 1},
    {"agree_on_group", 1}, {"meet_claimed", 4},    {"meet_counted", 4},   {"meet_met", 4},
    {"join_group", 1},     {"announce", 1},        {"allocate_group", 1}, {"announce", 2},
    {"join_group", 2}};

INSTANTIATE_TEST_SUITE_P(Places, DeathInInit, ::testing::ValuesIn(kPlaces));

/// Rank 1 of 3 stops there, for longer than the timeout, and is killed when both others have their errors.
void stop_there(const Place& place, const testing::SharedFolder& folder) {
  SCOPED_TRACE(std::string(place.failpoint) + "@" + std::to_string(place.pass));
  run_survivors(
      3, {1},
      [&](int rank) {
        if (rank == 1) {
          folder.write("pid", std::to_string(::getpid()));
          failpoint::configure(std::string(place.failpoint) + "=kill(19)@" + std::to_string(place.pass));
        }
        const auto text =
            message_of<c10::Error>([] { auto world = init_process_group({.timeout = 1500ms}); });
        int pid = 0;
        std::ifstream(folder.path("pid")) >> pid;
        EXPECT_THAT(text,
                    AllOf(HasSubstr("rank 1 (pid " + std::to_string(pid) + ")"), HasSubstr("is stopped")));
        // Each of the two waits for the other one to open the pipe.
        if (rank == 2) {
          std::ofstream(folder.path("pipe")) << "done";
        } else {
          std::string word;
          std::ifstream(folder.path("pipe")) >> word;
          ::kill(pid, SIGKILL);
        }
      },
      {.deadline = 40s, .environment = folder.environment()});
}

TEST(StopInInit, IsNamedByAllOthers) {
  const testing::SharedFolder folder;
  if (!testing::SharedFolder::in_rank()) {
    ASSERT_EQ(::mkfifo(folder.path("pipe").c_str(), 0600), 0);
  }
  for (const Place& place : kPlaces) {
    // Each takes the timeout, and the 3 s for which rank 0 keeps a store.
    const std::string name = place.failpoint;
    if (testing::long_run() || name == "peer_connected" || name == "agree_on_group")
      stop_there(place, folder);
  }
}

TEST(FailureInInit, OfOneRankIsTheErrorOfAll) {
  const auto outcomes = run_ranks_collect(
      3,
      [](int rank) {
        if (rank == 1) failpoint::configure("peers_connected=error(no luck)");
        EXPECT_THAT(message_of<c10::Error>([] { auto world = init_process_group({.timeout = 5min}); }),
                    HasSubstr("failed on rank 1: failpoint peers_connected: "
                              "no luck"));
      },
      {.deadline = 40s});
  expect_survivors(outcomes);
}

}  // namespace
}  // namespace lockstep::init_death_test
