#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <gmock/gmock.h>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/groups/internal/group_registry.h>
#include <lockstep/collectives/groups/open_backend.h>
#include <lockstep/collectives/groups/testing/survivors.h>
#include <lockstep/collectives/testing/random_cases.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// Ranks and hosts of a job are lost, and the others go on as a smaller group, over pretended hosts.
namespace lockstep::hosts_shrink_test {

using namespace collectives::internal;

namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using testing::die;
using testing::die_soon;
using testing::expect_whole_world;
using testing::go_on_until;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::run_survivors;
using testing::store_in_rank_0;

class HostsShrink : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  }
};

bool is_among(int rank, const std::vector<int>& ranks) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

bool spans_hosts() {
  const auto world = registry::require_world();
  EXPECT_EQ(registry::find({})->backend->spans_hosts(), world->control->spans_hosts());
  return world->control->spans_hosts();
}

struct Loss {
  int ranks;
  std::vector<int> victims;
  bool over_hosts;  // the group afterwards
};

class HostsShrinkAfter : public HostsShrink, public ::testing::WithParamInterface<Loss> {};

// Two hosts: ranks 0 and 1, and the others.
TEST_P(HostsShrinkAfter, TheOthersAreAWholeWorld) {
  const auto& [ranks, victims, over_hosts] = GetParam();
  run_survivors(ranks, victims, [&, ranks = ranks, victims = victims, over_hosts = over_hosts](int rank) {
    const char* host = rank < 2 ? "host-a" : "host-b";
    ::setenv("LOCKSTEP_TEST_HOST", host, 1);
    auto world = init_process_group();
    EXPECT_TRUE(spans_hosts());
    barrier();
    if (is_among(rank, victims)) die();
    EXPECT_THAT(message_of<c10::DistBackendError>([] { barrier(); }), HasSubstr("rank "));
    const auto made = shrink_group();
    EXPECT_EQ(made->getGroupName(), "default:shrunk:1");
    EXPECT_EQ(spans_hosts(), over_hosts);
    std::vector<int> members;
    for (int each = 0; each < ranks; ++each) {
      if (!is_among(each, victims)) members.push_back(each);
    }
    expect_whole_world(rank, members);
    barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, HostsShrinkAfter,
                         ::testing::Values(Loss{3, {2}, false}, Loss{4, {0}, true}, Loss{4, {3}, true},
                                           Loss{4, {1, 2}, true}, Loss{4, {2, 3}, false},
                                           Loss{4, {0, 1}, false}, Loss{4, {1, 2, 3}, false},
                                           Loss{5, {0, 3}, true}));

TEST_F(HostsShrink, AgainAndAgainUntilOneHostIsLeft) {
  run_survivors(5, {1, 3, 4},
                [](int rank) {
                  auto world = init_process_group();  // ranks 0 to 2, and 3 and 4
                  std::vector<int> members{0, 1, 2, 3, 4};
                  for (const int victim : {1, 3, 4}) {
                    barrier();
                    if (rank == victim) die();
                    EXPECT_THAT(message_of<c10::DistBackendError>([] { barrier(); }),
                                HasSubstr("rank " + std::to_string(victim)));
                    shrink_group();
                    std::erase(members, victim);
                    EXPECT_EQ(spans_hosts(), victim != 4);
                    expect_whole_world(rank, members);
                  }
                  EXPECT_EQ(default_group()->getGroupName(), "default:shrunk:3");
                  abort();  // and once more, in shared memory
                  shrink_group();
                  expect_whole_world(rank, members);
                },
                {.hosts = 2});
}

class DeathInHostsShrink : public HostsShrink, public ::testing::WithParamInterface<const char*> {};

TEST_P(DeathInHostsShrink, TheOthersGoOnWithoutItToo) {
  struct Case {
    int first, second;
    std::vector<int> survivors;
  };
  for (const Case& lost : {Case{1, 2, {0, 3}}, Case{3, 0, {1, 2}}}) {
    run_survivors(4, {lost.first, lost.second},
                  [&](int rank) {
                    auto world = init_process_group();
                    barrier();
                    if (rank == lost.first) die();
                    message_of([] { barrier(); });
                    if (rank == lost.second) failpoint::configure(std::string(GetParam()) + "=kill(9)");
                    go_on_until(2);
                    EXPECT_TRUE(spans_hosts());
                    expect_whole_world(rank, lost.survivors);
                  },
                  {.hosts = 2});
  }
}

INSTANTIATE_TEST_SUITE_P(Places, DeathInHostsShrink,
                         ::testing::Values("shrink", "shrink_entered", "shrink_agreed", "agree_on_group",
                                           "join_group", "announce", "shrink_joined", "shrink_made"));

TEST_F(HostsShrink, AfterAnAbortAllGoOnAndOldMessagesMatchNothing) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              at::Tensor old = at::full({100'000}, 1);
              at::Tensor fresh = at::full({100'000}, 2);
              Work sent;
              if (rank == 0) sent = isend(old, 3);  // which rank 3 never receives
              barrier();
              if (rank == 1) abort();
              message_of([] { barrier(); });
              shrink_group();
              if (rank == 0) send(fresh, 3);
              if (rank == 3) {
                recv(old, 0);
                EXPECT_TRUE(at::equal(old, fresh));
              }
              EXPECT_TRUE(spans_hosts());
              expect_whole_world(rank, {0, 1, 2, 3});
              shrink_group();  // nothing has failed at all
              expect_whole_world(rank, {0, 1, 2, 3});
            },
            {.hosts = 2});
}

TEST_F(HostsShrink, LivingRankIsExcludedByTheOthersAndLearnsIt) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              barrier();
              if (rank == 3) {
                EXPECT_THAT(message_of<c10::DistBackendError>([] { shrink_group(); }),
                            HasSubstr("went on without this rank"));
                return;
              }
              shrink_group({3});
              expect_whole_world(rank, {0, 1, 2});
            },
            {.hosts = 2});
}

TEST_F(HostsShrink, RankThatLivesAndDoesNotCallIsNamedAtTheTimeout) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              const auto others = new_group({0, 1, 3});
              at::Tensor word = at::ones({1});
              if (rank == 2) {
                recv(word, 0);
                return;
              }
              set_group_timeout(3s);
              barrier(others);
              const auto text = message_of<DistTimeoutError>([] { shrink_group(); });
              EXPECT_THAT(text, AllOf(HasSubstr("rank 2"), HasSubstr("ranks_to_exclude")));
              set_group_timeout(60s);
              barrier(others);
              if (rank == 0) send(word, 2);  // the old group is still there after an error
              barrier(others);
              shrink_group({2});
              expect_whole_world(rank, {0, 1, 3});
            },
            {.hosts = 2});
}

class OwnErrorInHostsShrink : public HostsShrink, public ::testing::WithParamInterface<const char*> {};

TEST_P(OwnErrorInHostsShrink, EndsTheOthersCallsAndTheNextOneSucceeds) {
  run_ranks(4,
            [&](int rank) {
              auto world = init_process_group();
              barrier();
              if (rank == 2) failpoint::configure(std::string(GetParam()) + "=error(no memory)@1");
              // Once a round has a decision all take part in it. Before, a rank may come when it has failed already:
              // then it meets the others in the next round.
              const bool may_come_later = std::string(GetParam()) == "shrink_entered" && rank != 2;
              std::string text;
              try {
                shrink_group();
              } catch (const c10::Error& error) {
                text = error.what_without_backtrace();
              }
              failpoint::configure("");
              if (!text.empty() || !may_come_later) {
                EXPECT_THAT(text, HasSubstr(rank == 2 ? "no memory" : "shrink_group"));
                shrink_group();
              }
              EXPECT_TRUE(spans_hosts());
              expect_whole_world(rank, {0, 1, 2, 3});
            },
            {.hosts = 2});
}

INSTANTIATE_TEST_SUITE_P(Places, OwnErrorInHostsShrink,
                         ::testing::Values("shrink_entered", "shrink_agreed", "agree_on_group", "join_group",
                                           "announce", "shrink_joined"));

TEST_F(HostsShrink, WithoutTheStoresHostAllEndWithOneError) {
  run_survivors(
      4, {0},
      [](int rank) {
        auto world = init_process_group({.rank = rank, .world_size = 4, .store = store_in_rank_0(rank)});
        barrier();
        if (rank == 0) die();
        message_of([] { barrier(); });
        const auto text = message_of<c10::DistStoreError>([] { shrink_group(); });
        EXPECT_THAT(text,
                    AllOf(HasSubstr("the job's store can't be reached"), HasSubstr("End this process")));
      },
      {.hosts = 2});
}

/// Another one's, until the wire between them is cut.
class WiredStore final : public c10d::PrefixStore {
 public:
  explicit WiredStore(c10::intrusive_ptr<c10d::Store> store) : PrefixStore("wired", std::move(store)) {}

  void cut() { cut_ = true; }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    look();
    PrefixStore::set(key, value);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    look();
    return PrefixStore::compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    look();
    return PrefixStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    look();
    return PrefixStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    look();
    return PrefixStore::check(keys);
  }

 private:
  void look() const { TORCH_CHECK_WITH(DistNetworkError, !cut_, "Connection reset by peer"); }
  std::atomic<bool> cut_ = false;
};

TEST_F(HostsShrink, SideWithoutTheStoreEndsAndTheOtherGoesOn) {
  run_ranks(4,
            [](int rank) {
              const auto launcher = testing::launcher_store();
              const auto store = c10::make_intrusive<WiredStore>(launcher);
              auto world = init_process_group({.rank = rank, .world_size = 4, .store = store});
              barrier();
              if (rank == 0) abort();
              message_of([] { barrier(); });
              if (rank >= 2) {
                store->cut();
                EXPECT_THAT(message_of<c10::DistStoreError>([] { shrink_group(); }),
                            AllOf(HasSubstr("the job's store can't be reached"), HasSubstr("cut off")));
                // One process ends, the other lives on.
                if (rank == 2) return;
                EXPECT_THAT(message_of<c10::DistStoreError>([] { shrink_group(); }),
                            HasSubstr("has left the group"));
                launcher->wait({"gone_on"});
                return;
              }
              shrink_group();
              if (rank == 0) launcher->set("gone_on", "1");
              EXPECT_FALSE(spans_hosts());
              expect_whole_world(rank, {0, 1});
            },
            {.hosts = 2});
}

TEST_F(HostsShrink, FurtherGroupIsShrunkAloneAndTheDefaultGroupLater) {
  run_survivors(4, {3},
                [](int rank) {
                  auto world = init_process_group();
                  const auto rows = new_group({0, 2, 3});
                  barrier();
                  if (rank == 3) die();
                  if (rank != 1) {
                    message_of([&] { barrier(rows); });
                    const auto smaller = shrink_group({}, rows);
                    EXPECT_THAT(get_process_group_ranks(smaller), ::testing::ElementsAre(0, 2));
                    at::Tensor tensor = at::full({1}, rank);
                    all_reduce(tensor, ReduceOp::SUM, smaller);
                    EXPECT_EQ(tensor.item<float>(), 2);
                  }
                  message_of([] { barrier(); });
                  shrink_group();
                  expect_whole_world(rank, {0, 1, 2});
                },
                {.hosts = 2});
}

TEST_F(HostsShrink, BackendOfAProgramThatKeepsGroupsItselfShrinksToo) {
  run_survivors(4, {1},
                [](int rank) {
                  auto world = init_process_group();  // for its store
                  auto store = c10::make_intrusive<c10d::PrefixStore>("own", default_group()->getStore());
                  auto backend = open_backend(store, rank, 4, {.group_name = "own", .timeout = 60s});
                  barrier();
                  if (rank == 1) die();
                  auto smaller = backend->shrink({});
                  EXPECT_EQ(smaller->getSize(), 3);
                  std::vector<at::Tensor> tensors{at::full({1}, rank)};
                  smaller->allreduce(tensors)->wait();
                  EXPECT_EQ(tensors[0].item<float>(), 5);
                  backend->shutdown();
                  smaller->shutdown();
                },
                {.hosts = 2});
}

TEST_F(HostsShrink, RanksDieAtRandomMomentsAndTheOthersEndWithTheSameBits) {
  const int runs = testing::long_run() ? 40 : 4;
  for (int run = 0; run < runs; ++run) {
    const uint64_t seed = testing::test_seed() * 1000 + static_cast<uint64_t>(run);
    std::vector<int> order{0, 1, 2, 3};
    std::mt19937_64 random(seed);
    for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[random() % (i + 1)]);
    const std::vector<int> victims(order.begin(), order.begin() + 2);
    run_survivors(4, victims,
                  [&](int rank) {
                    SCOPED_TRACE("LOCKSTEP_TEST_SEED=" + std::to_string(testing::test_seed()) + ", run " +
                                 std::to_string(run));
                    ::setenv("LOCKSTEP_TEST_HOST",
                             run % 2 == 0 ? (rank < 2 ? "a" : "b") : (rank < 1 ? "a" : "b"), 1);
                    auto world = init_process_group();
                    at::Tensor state = at::full({30'000}, 1, at::kDouble);
                    barrier();
                    if (is_among(rank, victims)) die_soon(seed + static_cast<uint64_t>(rank));
                    int64_t steps = 0;
                    int64_t last_steps = 0;
                    bool compare = false;
                    while (last_steps < 20) {
                      try {
                        if (compare) {
                          // A step that has failed here may have succeeded on another host.
                          at::Tensor counts = at::empty({get_world_size()}, at::kLong);
                          all_gather_into_tensor(counts, at::full({1}, steps, at::kLong));
                          EXPECT_LE(counts.max().item<int64_t>() - counts.min().item<int64_t>(), 1);
                          at::Tensor furthest = state.clone();
                          broadcast(furthest, static_cast<int>(counts.argmax().item<int64_t>()));
                          state = furthest;
                          steps = counts.max().item<int64_t>();
                          compare = false;
                        }
                        at::Tensor work = at::sin(state + static_cast<double>(steps));
                        all_reduce(work);
                        state = work;
                        ++steps;
                        if (get_world_size() == 2) ++last_steps;
                      } catch (const c10::DistBackendError&) {
                        shrink_group();
                        compare = true;
                      }
                    }
                    at::Tensor all = at::empty({2, state.numel()}, at::kDouble);
                    all_gather_into_tensor(all, state);
                    EXPECT_TRUE(at::equal(all[0], all[1]));
                  },
                  {.environment = testing::seed_environment(testing::test_seed())});
    if (::testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace lockstep::hosts_shrink_test
