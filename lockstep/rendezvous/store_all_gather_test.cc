#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <set>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <lockstep/base/errors.h>
#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/internal/sockets.h>
#include <lockstep/rendezvous/internal/tcp_store.h>
#include <lockstep/rendezvous/process_stat.h>
#include <lockstep/rendezvous/process_watch.h>
#include <lockstep/rendezvous/protocol_version.h>
#include <lockstep/rendezvous/rendezvous.h>
#include <lockstep/rendezvous/store_all_gather.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::store_all_gather_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::StartsWith;

/// Runs all-gather on a thread for each of `ranks` and returns what each got: its answer joined by "|", or
/// the error.
std::vector<std::string> run(c10d::Store& store, const std::vector<int>& ranks,
                             const std::vector<int>& world_sizes, std::chrono::milliseconds timeout) {
  std::vector<std::string> results(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        auto mine = std::string("\0x", 2) + std::to_string(ranks[i]);
        for (const auto& text :
             store_all_gather(store, "key", ranks[i], world_sizes[i], mine, Deadline::after(timeout))) {
          results[i] += text.substr(1) + "|";
        }
      } catch (const DistTimeoutError& error) {
        results[i] = std::string("timeout: ") + error.what_without_backtrace();
      } catch (const c10::DistBackendError& error) {
        results[i] = std::string("backend: ") + error.what_without_backtrace();
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

TEST(StoreAllGather, ReturnsTheBytesOfAllInRankOrder) {
  c10d::HashStore store;
  for (const auto& result : run(store, {2, 0, 3, 1}, 4, 60s)) EXPECT_EQ(result, "x0|x1|x2|x3|");
}

TEST(StoreAllGather, AloneNeedsNoOther) {
  c10d::HashStore store;
  EXPECT_THAT(store_all_gather(store, "key", 0, 1, "me", Deadline::after(0s)), ::testing::ElementsAre("me"));
}

TEST(StoreAllGather, NamesTheMissingRanksToAllThatCame) {
  c10d::HashStore store;
  for (const auto& result : run(store, {0, 1, 2, 4, 7}, 8, 100ms)) {
    EXPECT_THAT(result,
                AllOf(HasSubstr("timeout: ranks 3, 5 and 6 of 8 did not join"), HasSubstr(" within ")));
  }
}

TEST(StoreAllGather, TwoProcessesWithOneRankFailAll) {
  c10d::HashStore store;
  for (const auto& result : run(store, {0, 1, 1}, 3, 60s)) {
    EXPECT_THAT(result, AllOf(HasSubstr("store: rank 1 of 3 is claimed twice"), HasSubstr("process ")));
  }
}

TEST(StoreAllGather, DifferentWorldSizesFailAll) {
  c10d::HashStore store;
  for (const auto& result : run(store, {0, 1}, {3, 4}, 60s)) {
    EXPECT_THAT(result, AllOf(HasSubstr("store: rank "), HasSubstr("was started with world size ")));
  }
}

// What a rank of another build writes when it comes first. These bytes stay as they are in every version.
TEST(StoreAllGather, AnotherVersionFailsAll) {
  const std::string theirs =
      "rank 2, process 7 on node-b, runs Lockstep 9.1 (messages of version 4000000000)";
  for (const auto& [first, other] :
       {std::pair("3 4000000000 " + theirs, theirs),
        std::pair(std::string("3"),
                  std::string("another rank runs a Lockstep that does not tell its version"))}) {
    c10d::HashStore store;
    store.set("key/size", {first.begin(), first.end()});
    for (const auto& result : run(store, {0, 1}, 3, 60s)) {
      EXPECT_THAT(result,
                  AllOf(StartsWith("store: rank "), HasSubstr(" on " + this_host().hostname),
                        HasSubstr("runs " + own_version() + ", but " + other + "; they would misread"),
                        HasSubstr("install the same Lockstep on all hosts")));
    }
  }
}

TEST(StoreAllGather, SaysWhichVersionItIsOf) {
  c10d::HashStore store;
  EXPECT_THAT(run(store, {0}, 2, 1ms).front(), StartsWith("timeout: rank 1 of 2 did not join"));
  const auto bytes = store.get("key/size");
  EXPECT_THAT(std::string(bytes.begin(), bytes.end()),
              AllOf(StartsWith("2 " + std::to_string(kProtocolVersion) + " rank 0, process "),
                    HasSubstr("runs " + own_version())));
}

TEST(StoreAllGather, RefusesARankOutsideOfTheWorld) {
  c10d::HashStore store;
  EXPECT_THROW(store_all_gather(store, "key", 2, 2, "", Deadline::after(1s)), c10::ValueError);
  EXPECT_THROW(store_all_gather(store, "key", -1, 2, "", Deadline::after(1s)), c10::ValueError);
}

TEST(StoreAllGather, WaitEndsWithWhatTheCallerThrows) {
  c10d::HashStore store;
  int calls = 0;
  const auto interrupt = [&] { TORCH_CHECK(++calls < 3, "enough"); };
  EXPECT_THROW(store_all_gather(store, "key", 0, 2, "me", Deadline::after(60s), interrupt), c10::Error);
  EXPECT_EQ(calls, 3);
}

TEST(StoreAllGather, ForgetsEverythingWhenToldTo) {
  c10d::HashStore store;
  store.set("other", {1});
  for (const auto& result : run(store, {0, 1, 2}, 3, 60s)) EXPECT_EQ(result, "x0|x1|x2|");
  EXPECT_GT(store.getNumKeys(), 1);
  forget_store_all_gather(store, "key", 3);
  EXPECT_EQ(store.getNumKeys(), 1);
  for (const auto& result : run(store, {0, 1, 2}, 3, 60s)) EXPECT_EQ(result, "x0|x1|x2|");
}

std::vector<uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

TEST(StoreAllGather, OutcomeOfALastRankThatEndsIsSetByAnother) {
  c10d::HashStore store;
  std::thread ending([&] {
    while (store.add("key/count", 0) < 1) std::this_thread::yield();
    store.set("key/data/1", {'?', 'x', '1'});
    store.add("key/count", 1);  // and no outcome
  });
  EXPECT_THAT(run(store, {0}, 2, 20s), ::testing::ElementsAre("x0|x1|"));
  ending.join();
}

/// A process that has ended: no other had this pid and this start.
std::string ended_process() {
  auto process = this_process();
  ++process.start;
  return process.to_string();
}

TEST(StoreAllGather, RankWhoseProcessHasEndedIsNamedToAllOthers) {
  const auto named = HasSubstr(": rank 1 (pid " + std::to_string(::getpid()) + ") ");
  c10d::HashStore store;
  store.set("key/claim/1", {'1'});
  store.set("key/who/1", bytes_of(ended_process()));
  EXPECT_THAT(run(store, {0, 2, 3}, 4, 60s),
              ::testing::Each(AllOf(HasSubstr("backend: joining the job failed on rank "), named)));
  // One that came to an earlier all-gather, and to this one no more.
  c10d::HashStore later;
  later.set("earlier/who/1", bytes_of(ended_process()));
  try {
    store_all_gather(later, "key", 0, 2, "", Deadline::after(60s), {}, "earlier");
    ADD_FAILURE() << "succeeded without rank 1";
  } catch (const c10::DistBackendError& error) {
    EXPECT_THAT(error.what(), named);
  }
}

TEST(StoreAllGather, ATimeoutTellsWhichRankIsStopped) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, WUNTRACED), child);
  auto process = this_process();
  process.pid = child;
  process.start = read_process_stat(child).value().start;
  const auto stopped = HasSubstr("; rank 0 (pid " + std::to_string(child) + ") is stopped (by SIGSTOP");
  c10d::HashStore store;
  store.set("key/claim/0", {'1'});
  store.set("key/who/0", bytes_of(process.to_string()));
  EXPECT_THAT(run(store, {1}, 2, 1ms)[0], AllOf(HasSubstr("timeout: rank 0 of 2 did not join"), stopped));
  // It has published, but not said that it is there.
  store.set("key/data/0", {'?', 'x', '0'});
  EXPECT_THAT(run(store, {1}, 2, 1ms)[0], AllOf(HasSubstr("timeout: all 2 ranks came"), stopped));
  ::kill(child, SIGKILL);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST(StoreAllGather, RankThatGaveUpDoesNotCountAsEnded) {
  c10d::HashStore store;
  EXPECT_THAT(run(store, {1}, 2, 1ms)[0], HasSubstr("timeout: rank 0 of 2 did not join"));
  // It ends, and another process takes its place.
  for (const auto& result : run(store, {0, 1}, 2, 60s)) EXPECT_EQ(result, "x0|x1|");
}

TEST(StoreAllGather, ATimeoutAfterAnEarlierOneIsThatOfAllRanks) {
  c10d::HashStore store;
  for (int rank : {1, 2}) {
    store.set("earlier/who/" + std::to_string(rank), bytes_of(this_process().to_string()));
  }
  const auto wait = [&](int rank, std::chrono::milliseconds timeout, std::string& error) {
    try {
      store_all_gather(store, "key", rank, 3, "", Deadline::after(timeout), {}, "earlier");
    } catch (const DistTimeoutError& late) {
      error = late.what_without_backtrace();
    }
  };
  std::string first;
  std::string second;
  std::thread patient([&] { wait(2, 20s, second); });
  wait(1, 100ms, first);
  patient.join();
  EXPECT_THAT(first, HasSubstr("did not join within"));
  EXPECT_EQ(first, second) << "rank 2 has time left";
}

TEST(StoreAllGather, ErrorOfOnesWatchIsThrownByAll) {
  c10d::HashStore store;
  const auto watch = [] { TORCH_CHECK(false, "rank 2 (pid 42) has ended"); };
  std::string other;
  std::thread thread([&] {
    other = message_of([&] { store_all_gather(store, "key", 1, 3, "", Deadline::after(60s), [] {}); });
  });
  EXPECT_EQ(message_of([&] { store_all_gather(store, "key", 0, 3, "", Deadline::after(60s), watch); }),
            "rank 2 (pid 42) has ended");
  thread.join();
  EXPECT_EQ(other, "rank 2 (pid 42) has ended");
}

TEST(StoreAllGather, OneThatCannotComeFailsAll) {
  c10d::HashStore store;
  EXPECT_FALSE(store_all_gather_is_decided(store, "key", 2, 3));
  std::string first;
  std::string second;
  std::thread rank1(
      [&] { first = message_of([&] { store_all_gather(store, "key", 1, 3, "", Deadline::after(60s)); }); });
  std::thread rank2([&] {
    second = message_of([&] { fail_store_all_gather(store, "key", 2, 3, "no memory", false, ""); });
  });
  EXPECT_EQ(message_of([&] { store_all_gather(store, "key", 0, 3, "", Deadline::after(60s)); }), "no memory");
  rank1.join();
  rank2.join();
  EXPECT_EQ(first, "no memory");
  EXPECT_EQ(second, "no memory");
  EXPECT_TRUE(store_all_gather_is_decided(store, "key", 2, 3));
  EXPECT_EQ(message_of([&] { fail_store_all_gather(store, "key", 1, 3, "too late", false, ""); }),
            "no memory");
}

// In a process of its own, for a thread of it goes on reading.
TEST(StoreAllGather, FileThatEndsInARecordIsNamedAtTheDeadline) {
  testing::run_ranks(1, [](int) {
    const testing::TemporaryFolder folder;
    const std::string path = folder.path("store");
    const auto store = c10::make_intrusive<c10d::FileStore>(path, 2);
    const uint64_t size = 20;
    std::ofstream(path, std::ios::binary | std::ios::app)
        .write(reinterpret_cast<const char*>(&size), sizeof size);
    try {
      store_all_gather(*c10::make_intrusive<c10d::PrefixStore>("job", store), "key", 0, 2, "",
                       Deadline::after(100ms));
      ADD_FAILURE() << "the file was read";
    } catch (const c10::DistStoreError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr(path), HasSubstr("delete the file")));
    }
    std::filesystem::remove(path);  // before the store ends, which would read it again
  });
}

// TCPStore waits for ever for the answer of a process that is stopped.
TEST(StoreAllGather, AStoppedStoreIsNamedAtTheDeadline) {
  testing::run_ranks(2, [&](int rank) {
    const auto launchers = rendezvous({.timeout = 60s}).store;
    const auto limit = Deadline::after(60s);
    if (rank == 0) {
      auto listener = rendezvous_internal::listen_at("127.0.0.1", 0, true);
      const auto port = std::to_string(listener.port);
      const auto store = rendezvous_internal::host_store(std::move(listener), 60s, limit);
      launchers->set("port", port);
      EXPECT_EQ(message_of<c10::DistBackendError>([&] { store_all_gather(*store, "key", 0, 3, "", limit); }),
                "it is over");
      return;
    }
    const auto port = static_cast<uint16_t>(std::stoi(launchers->get_to_str("port")));
    const auto where = [&] { return rendezvous_internal::HostPort{.host = "127.0.0.1", .port = port}; };
    const auto join = [&] { return rendezvous_internal::join_store(where, "", "rank 0", 1, 60s, limit); };
    const auto store = join(), other = join();
    const auto await_count = [&](const std::string& count) {
      while (!other->check({"key/count"}) || other->get_to_str("key/count") != count)
        std::this_thread::yield();
    };
    await_count("1");
    const pid_t pid = ProcessIdentity::parse(other->get_to_str("key/who/0")).pid;
    std::thread stopper([&] {
      await_count("2");
      EXPECT_EQ(::kill(pid, SIGSTOP), 0);
    });
    const std::string text = message_of<c10::DistStoreError>(
        [&] { store_all_gather(*store, "key", 1, 3, "", Deadline::after(1s)); });
    stopper.join();
    EXPECT_EQ(::kill(pid, SIGCONT), 0);
    EXPECT_THAT(text, AllOf(HasSubstr("has no answer from the store"),
                            HasSubstr("rank 0 (pid " + std::to_string(pid) + ") is stopped")));
    other->compareSet("key/outcome", "", "failed: it is over");
  });
}

TEST(StoreAllGather, AWaitingRankWritesNothingIntoAFile) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.path("store");
  const auto store = c10::make_intrusive<c10d::FileStore>(path, 2);
  std::set<uintmax_t> sizes;
  const auto note_size = [&] { sizes.insert(std::filesystem::file_size(path)); };
  // Longer than the interval at which a waiting rank looks at the count.
  EXPECT_THROW(store_all_gather(*c10::make_intrusive<c10d::PrefixStore>("job", store), "key", 0, 2, "",
                                Deadline::after(600ms), note_size),
               DistTimeoutError);
  EXPECT_EQ(sizes.size(), 1);
}

TEST(StoreAllGather, ForeignValuesInTheStoreAreNamed) {
  for (const char* key : {"key/claim/1", "key/count"}) {
    c10d::HashStore store;
    store.set(key, {'x'});
    try {
      store_all_gather(store, "key", 1, 2, "me", Deadline::after(60s));
      ADD_FAILURE() << key << " was accepted";
    } catch (const c10::DistStoreError& error) {
      EXPECT_THAT(error.what(), HasSubstr(std::string("no number under '") + key + "'"));
    }
  }
}

}  // namespace
}  // namespace lockstep::store_all_gather_test
