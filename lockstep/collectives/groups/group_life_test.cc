#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <optional>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/thread_cache.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/groups/internal/group_registry.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/testing/tensors.h>

// What groups cost, how they end, and what becomes of them when something goes wrong while they are made.
namespace lockstep::group_life_test {

using namespace collectives::internal;

namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::run_survivors;
using testing::sum_of_ranks;

// ---- Cost

int64_t entries_of(const char* directory) {
  const std::filesystem::directory_iterator begin(directory);
  return std::distance(begin, std::filesystem::directory_iterator());
}

/// Threads that are no longer counted as background ones and have not quite ended.
constexpr int kEndingThreads = 8;

/// What this process holds.
struct Holdings {
  int64_t threads = 0;  // without those that wait for background work of any group
  int64_t descriptors = 0;
  int64_t arena_bytes = 0;
  int64_t resident_bytes = 0;

  static Holdings now() {
    Holdings now;
    now.threads = -background_thread_count();  // first: of those that end just now, none counts against us
    now.threads += entries_of("/proc/self/task");
    now.descriptors = entries_of("/proc/self/fd");
    now.arena_bytes = static_cast<int64_t>(registry::require_world()->transport->arena().bytes_in_use());
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages >> pages;
    now.resident_bytes = pages * ::sysconf(_SC_PAGESIZE);
    return now;
  }
};

/// Memory of closed groups is given back when a later group closes; with these, of all before them.
void sweep_closed_groups() {
  barrier();
  for (int rank = 0; rank < get_world_size(); ++rank) destroy_process_group(new_group({rank}));
  barrier();
}

void use_and_drop_groups(int count) {
  std::vector<ProcessGroup> groups;
  for (int i = 0; i < count; ++i) groups.push_back(new_group({}, {}, {.group_desc = "one of many"}));
  const int64_t threads = Holdings::now().threads;
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < count; ++i) {
    ASSERT_EQ(sum_of_ranks(groups[i]), 1);
    if (i % 10 != 0) continue;
    tensors.push_back(at::full({1}, i, at::kLong));
    works.push_back(all_reduce(tensors.back(), ReduceOp::SUM, groups[i], /*async_op=*/true));
  }
  for (size_t i = 0; i < works.size(); ++i) {
    works[i]->wait();
    ASSERT_EQ(tensors[i].item<int64_t>(), static_cast<int64_t>(20 * i));
  }
  EXPECT_LE(Holdings::now().threads, threads + kEndingThreads) << "no thread for each group";
  for (const auto& group : groups) destroy_process_group(group);
}

TEST(GroupLife, ThousandsAtOnceCostNoThreadsAndLeakNothing) {
  run_ranks(2,
            [](int) {
              auto world = init_process_group();
              use_and_drop_groups(20);
              sweep_closed_groups();
              const Holdings before = Holdings::now();
              [[maybe_unused]] Holdings after_first;
              for (int round = 0; round < 3; ++round) {
                use_and_drop_groups(2000);
                sweep_closed_groups();
                const Holdings after = Holdings::now();
                EXPECT_LE(after.threads, before.threads + kEndingThreads);
                EXPECT_EQ(after.descriptors, before.descriptors);
                EXPECT_EQ(after.arena_bytes, before.arena_bytes);
                if (round == 0) after_first = after;
              }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which keep what is freed
              const int64_t growth = Holdings::now().resident_bytes - after_first.resident_bytes;
              EXPECT_LT(growth, int64_t{64} << 20);
#endif
            },
            {.deadline = 240s});
}

TEST(GroupLife, ManyWorldsInOneProcess) {
  run_ranks(2,
            [](int rank) {
              int64_t descriptors = 0;
              ProcessGroup earlier;
              for (int round = 0; round < 20; ++round) {
                auto world = init_process_group();
                EXPECT_EQ(get_pg_count(), 1) << "counted afresh";
                auto group = new_group({0, 1});
                auto local = new_group({0, 1}, {}, {.use_local_synchronization = true});
                ASSERT_EQ(group->getGroupName(), "1");
                ASSERT_EQ(sum_of_ranks(group) + sum_of_ranks(local) + sum_of_ranks({}), 3);
                if (earlier) {
                  EXPECT_THAT(message_of<c10::ValueError>([&] { get_rank(earlier); }),
                              HasSubstr("belongs to a default group that was destroyed"));
                  EXPECT_THROW(barrier(earlier), c10::Error);
                  EXPECT_THROW(destroy_process_group(earlier), c10::ValueError);
                }
                earlier = group;
                if (round % 2 == rank) destroy_process_group(group);  // or with all others
                if (round == 1) descriptors = entries_of("/proc/self/fd");
                if (round > 1) {
                  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors) << "in round " << round;
                }
              }
              EXPECT_FALSE(is_initialized());
            },
            {.deadline = 120s});
}

// ---- Ends

/// What a static object ends, when main() has returned.
struct HeldToTheExit {
  ~HeldToTheExit() {
    if (!world) return;
    if (!exits.empty()) UniqueFd(::open(exits.c_str(), O_WRONLY));  // waits until the other rank reads
    world.reset();                                                  // waits for the operation
    if (!at::equal(tensor, at::full({100'000}, 3, at::kFloat))) ::_exit(9);
  }
  std::string exits;
  at::Tensor tensor;
  Work work;
  std::optional<DefaultGroup> world;
};

TEST(GroupLife, AStaticObjectMayEndAGroupWithItsOperationsAlsoOverHosts) {
  const testing::SharedFolder folder;
  for (const int hosts : {1, 2}) {
    if (hosts > 1 && !testing::has_wire()) continue;
    const std::string exits = folder.path("exits" + std::to_string(hosts));
    ::mkfifo(exits.c_str(), 0600);
    static HeldToTheExit held;  // whose destructor runs after handlers that the group registers
    run_ranks(2,
              [&](int rank) {
                held.tensor = at::full({100'000}, rank + 1, at::kFloat);
                held.world.emplace(init_process_group());
                if (rank == 0) held.exits = exits;
                if (rank == 1) UniqueFd(::open(exits.c_str(), O_RDONLY));  // waits until rank 0 exits
                held.work = all_reduce(held.tensor, ReduceOp::SUM, {}, /*async_op=*/true);
              },
              {.hosts = hosts, .environment = folder.environment()});
  }
}

TEST(GroupLife, UseAfterDestroyIsRefused) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    auto group = new_group({}, {}, {.group_name = "short-lived"});
    EXPECT_EQ(sum_of_ranks(group), 1);
    destroy_process_group(group);
    for (const std::function<void()>& use : std::vector<std::function<void()>>{
             [&] { get_rank(group); }, [&] { get_process_group_ranks(group); },
             [&] { new_subgroups(1, group); }, [&] { split_group(group, {{0}}); },
             [&] { set_group_timeout(1s, group); }, [&] { abort(group); },
             [&] { destroy_process_group(group); }}) {
      EXPECT_THAT(message_of<c10::ValueError>(use), HasSubstr("it was destroyed"));
    }
    EXPECT_THROW(barrier(group), c10::Error);
    EXPECT_EQ(sum_of_ranks({}), 1);
    destroy_process_group();
    EXPECT_FALSE(is_initialized());
    EXPECT_THROW(new_group(), c10::ValueError);
  });
}

TEST(GroupLife, AbortOfTheDefaultGroupEndsAllOthersAndTheMakingOfNewOnes) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    auto group = new_group();
    if (rank == 0) {
      abort();
      EXPECT_THAT(message_of([&] { barrier(group); }), HasSubstr("aborted by rank 0"));
    } else if (rank == 1) {
      EXPECT_THAT(message_of([&] { barrier(group); }), HasSubstr("aborted by rank 0"));
    }
    EXPECT_THAT(message_of([&] { new_group(); }), HasSubstr("aborted by rank 0"));
    EXPECT_THAT(message_of([&] { barrier(); }), HasSubstr("aborted by rank 0"));
  });
}

TEST(GroupLife, LeavingTheWorldWhileOthersMakeAGroupIsAnErrorForThem) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    if (rank == 1) return;
    EXPECT_THAT(message_of([] { new_group(); }), HasSubstr("rank 1"));
  });
}

// ---- Death

class DeathWhileMaking : public ::testing::TestWithParam<std::tuple<const char*, bool>> {};

TEST_P(DeathWhileMaking, IsToldToTheOthersWhoGoOn) {
  const auto [where, local] = GetParam();
  run_survivors(3, {1}, [&](int rank) {
    auto world = init_process_group();
    auto survivors = new_group({0, 2});
    GroupOptions options;
    options.use_local_synchronization = local;
    if (rank == 1) failpoint::configure(std::string(where) + "=kill(9)");
    const auto text = message_of([&] { new_group({0, 1, 2}, {}, options); });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1 (pid"), HasSubstr("signal 9")));
    EXPECT_EQ(sum_of_ranks(survivors), 2);
    // All ranks can't meet any more, but those that live can.
    options.use_local_synchronization = true;
    EXPECT_EQ(sum_of_ranks(new_group({0, 2}, {}, options)), 2);
    EXPECT_THAT(message_of([] { new_group({0, 2}); }), HasSubstr("rank 1 (pid"));
  });
}

INSTANTIATE_TEST_SUITE_P(Places, DeathWhileMaking,
                         ::testing::Combine(::testing::Values("agree_on_group", "join_group"),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "_locally" : "_together");
                         });

TEST(GroupLife, OwnFailureWhileMakingIsTheOthersErrorToo) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    if (rank == 1) failpoint::configure("allocate_group=error(no memory)");
    EXPECT_THAT(message_of<c10::Error>([] { new_group({}, {}, {.group_name = "unlucky"}); }),
                HasSubstr(rank == 1 ? "no memory" : "rank 1 had no memory for it"));
    failpoint::configure("");
    EXPECT_EQ(sum_of_ranks(new_group()), 1);
  });
}

// ---- Threads

TEST(GroupLife, OverlappingGroupsInTwoThreads) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    // Each rank is in two of them, and uses each in a thread of its own.
    std::vector<ProcessGroup> pairs{new_group({0, 1}), new_group({1, 2}), new_group({2, 0})};
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
      if (!is_member(pairs[i])) continue;
      threads.emplace_back([i, pair = pairs[i]] {
        for (int round = 0; round < 200; ++round) {
          at::Tensor tensor = at::full({round % 2 == 0 ? 3 : 5000}, get_rank(), at::kInt);
          auto work = all_reduce(tensor, ReduceOp::SUM, pair, /*async_op=*/round % 3 == 0);
          if (work) work->wait();
          ASSERT_EQ(tensor[-1].item<int>(), i + (i + 1) % 3);
        }
      });
    }
    ASSERT_EQ(threads.size(), 2u) << "on rank " << rank;
  });
}

TEST(GroupLife, MadeInTwoThreadsInOppositeOrders) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    // A ring of pairs: served one after the other, with each rank beginning at another one, no rank would get
    // through.
    const auto make = [](std::vector<int> ranks) {
      const int expected = ranks[0] + ranks[1];
      for (int round = 0; round < 10; ++round) {
        auto group = new_group(ranks, {}, {.use_local_synchronization = true});
        ASSERT_EQ(sum_of_ranks(group), expected);
        destroy_process_group(group);
      }
    };
    std::thread next(make, std::vector{rank, (rank + 1) % 3});
    std::thread previous(make, std::vector{rank, (rank + 2) % 3});
    next.join();
    previous.join();
  });
}

TEST(GroupLife, MadeInTwoThreadsByAllRanksTogether) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    // All calls look alike, so every order of them is the same on all ranks.
    std::mutex mutex;
    std::vector<ProcessGroup> groups;
    const auto make = [&] {
      for (int round = 0; round < 50; ++round) {
        auto group = new_group();
        std::lock_guard lock(mutex);
        groups.push_back(group);
      }
    };
    std::thread one(make);
    std::thread other(make);
    one.join();
    other.join();
    std::sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) {
      return std::stoi(a->getGroupName()) < std::stoi(b->getGroupName());
    });
    ASSERT_EQ(groups.size(), 100u);
    for (const auto& group : groups) ASSERT_EQ(sum_of_ranks(group), 1);
  });
}

}  // namespace
}  // namespace lockstep::group_life_test
