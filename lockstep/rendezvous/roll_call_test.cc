#include <gmock/gmock.h>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <lockstep/base/errors.h>
#include <lockstep/rendezvous/roll_call.h>

namespace lockstep::roll_call_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Runs exchange on a thread for each of `ranks` and returns what each got: its answer joined by "|", or the
/// error.
std::vector<std::string> run(c10d::Store& store, const std::vector<int>& ranks,
                             const std::vector<int>& world_sizes, std::chrono::milliseconds timeout) {
  std::vector<std::string> results(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        auto mine = std::string("\0x", 2) + std::to_string(ranks[i]);
        for (const auto& text :
             exchange(store, "key", ranks[i], world_sizes[i], mine, Deadline::after(timeout))) {
          results[i] += text.substr(1) + "|";
        }
      } catch (const DistTimeoutError& error) {
        results[i] = std::string("timeout: ") + error.what_without_backtrace();
      } catch (const c10::DistStoreError& error) {
        results[i] = std::string("store: ") + error.what_without_backtrace();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return results;
}

std::vector<std::string> run(c10d::Store& store, const std::vector<int>& ranks, int world_size,
                             std::chrono::milliseconds timeout) {
  return run(store, ranks, std::vector<int>(ranks.size(), world_size), timeout);
}

TEST(RollCall, ReturnsEverybodysBytesInRankOrder) {
  c10d::HashStore store;
  for (const auto& result : run(store, {2, 0, 3, 1}, 4, 60s)) EXPECT_EQ(result, "x0|x1|x2|x3|");
}

TEST(RollCall, AloneNeedsNobody) {
  c10d::HashStore store;
  EXPECT_THAT(exchange(store, "key", 0, 1, "me", Deadline::after(0s)), ::testing::ElementsAre("me"));
}

TEST(RollCall, NamesTheMissingRanksToAllThatCame) {
  c10d::HashStore store;
  for (const auto& result : run(store, {0, 1, 2, 4, 7}, 8, 100ms)) {
    EXPECT_THAT(result,
                AllOf(HasSubstr("timeout: ranks 3, 5 and 6 of 8 did not join"), HasSubstr(" within 0.1")));
  }
}

TEST(RollCall, TwoProcessesWithOneRankFailEverybody) {
  c10d::HashStore store;
  for (const auto& result : run(store, {0, 1, 1}, 3, 60s)) {
    EXPECT_THAT(result, AllOf(HasSubstr("store: rank 1 of 3 is claimed twice"), HasSubstr("process ")));
  }
}

TEST(RollCall, DifferentWorldSizesFailEverybody) {
  c10d::HashStore store;
  for (const auto& result : run(store, {0, 1}, {3, 4}, 60s)) {
    EXPECT_THAT(result, AllOf(HasSubstr("store: rank "), HasSubstr("was started with world size ")));
  }
}

TEST(RollCall, RefusesARankOutsideOfTheWorld) {
  c10d::HashStore store;
  EXPECT_THROW(exchange(store, "key", 2, 2, "", Deadline::after(1s)), c10::ValueError);
  EXPECT_THROW(exchange(store, "key", -1, 2, "", Deadline::after(1s)), c10::ValueError);
}

TEST(RollCall, WaitEndsWithWhatTheCallerThrows) {
  c10d::HashStore store;
  int calls = 0;
  const auto interrupt = [&] { TORCH_CHECK(++calls < 3, "enough"); };
  EXPECT_THROW(exchange(store, "key", 0, 2, "me", Deadline::after(60s), interrupt), c10::Error);
  EXPECT_EQ(calls, 3);
}

TEST(RollCall, ForgetsEverythingWhenToldTo) {
  c10d::HashStore store;
  store.set("other", {1});
  for (const auto& result : run(store, {0, 1, 2}, 3, 60s)) EXPECT_EQ(result, "x0|x1|x2|");
  EXPECT_GT(store.getNumKeys(), 1);
  forget_exchange(store, "key", 3);
  EXPECT_EQ(store.getNumKeys(), 1);
  for (const auto& result : run(store, {0, 1, 2}, 3, 60s)) EXPECT_EQ(result, "x0|x1|x2|");
}

TEST(RollCall, ForeignValuesInTheStoreAreNamed) {
  for (const char* key : {"key/claim/1", "key/count"}) {
    c10d::HashStore store;
    store.set(key, {'x'});
    try {
      exchange(store, "key", 1, 2, "me", Deadline::after(60s));
      ADD_FAILURE() << key << " was accepted";
    } catch (const c10::DistStoreError& error) {
      EXPECT_THAT(error.what(), HasSubstr(std::string("no number under '") + key + "'"));
    }
  }
}

}  // namespace
}  // namespace lockstep::roll_call_test
