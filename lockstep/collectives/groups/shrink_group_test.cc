#include <algorithm>
#include <chrono>
#include <csignal>
#include <gmock/gmock.h>
#include <numeric>
#include <random>
#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/groups/internal/group_registry.h>
#include <lockstep/collectives/groups/open_backend.h>
#include <lockstep/collectives/groups/testing/survivors.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/collectives/testing/random_cases.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// Ranks of a job die, stop, or stay away, and the others go on as a smaller group in the same processes.
namespace lockstep::shrink_group_test {

using namespace collectives::internal;

namespace {

using namespace std::chrono_literals;
using testing::die;
using testing::die_soon;
using ::testing::ElementsAre;
using testing::expect_whole_world;
using testing::go_on_until;
using ::testing::HasSubstr;
using testing::launcher_store;
using testing::message_of;
using testing::numbers_of;
using testing::run_ranks;
using testing::run_survivors;
using testing::store_in_rank_0;
using testing::sum_of;

// ---- deaths

class ShrinkAfterDeath : public ::testing::TestWithParam<int> {};

TEST_P(ShrinkAfterDeath, GoesOnAsAWholeWorld) {
  const int victim = GetParam();  // 0 holds the store
  run_survivors(3, {victim}, [&](int rank) {
    auto world = init_process_group({.rank = rank, .world_size = 3, .store = store_in_rank_0(rank)});
    const auto old = default_group();
    const auto other = new_group({0, 1, 2});
    at::Tensor shared = empty_shared({100'000});
    shared.copy_(numbers_of(rank, shared.numel()));
    if (rank == victim) failpoint::configure("reduce=kill(9)");
    at::Tensor lost = empty_shared({100'000}).fill_(1);
    const auto text = message_of([&] { all_reduce(lost); });
    EXPECT_THAT(text, HasSubstr("rank " + std::to_string(victim) + " (pid"));

    const auto made = shrink_group();
    EXPECT_EQ(made, default_group());
    EXPECT_EQ(made->getGroupName(), "default:shrunk:1");
    EXPECT_EQ(made->getGroupDesc(), "default:shrunken");
    EXPECT_EQ(world.rank(), get_rank());
    std::vector<int> members{0, 1, 2};
    members.erase(members.begin() + victim);
    // A tensor from before is still where the others read it.
    EXPECT_TRUE(registry::require_world()->transport->arena().find(shared.const_data_ptr(), shared.nbytes()));
    all_reduce(shared);
    EXPECT_TRUE(at::equal(shared, sum_of(members, shared.numel())));
    expect_whole_world(rank, members);
    for (const auto& group : {old, other}) {
      EXPECT_THAT(message_of([&] { barrier(group); }), HasSubstr("was destroyed"));
      EXPECT_THAT(message_of<c10::ValueError>([&] { get_rank(group); }), HasSubstr("was destroyed"));
    }
    barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Victims, ShrinkAfterDeath, ::testing::Values(0, 1, 2));

TEST(ShrinkGroup, AgainAndAgainDownToOneNamingRanksAsTheJobDid) {
  run_survivors(4, {0, 1, 3}, [](int rank) {
    auto world = init_process_group();
    std::vector<int> members{0, 1, 2, 3};
    at::Tensor shared = empty_shared({50'000});
    for (const int victim : {0, 3, 1}) {
      barrier();
      if (rank == victim) die();
      const auto text = message_of([] { barrier(); });
      const std::string who = "rank " + std::to_string(victim) + (victim == 0 ? "" : " of the job") + " (pid";
      EXPECT_THAT(text, HasSubstr(who));
      EXPECT_THAT(text, HasSubstr("failed on rank " + std::to_string(rank) + " of group"));
      shrink_group();
      std::erase(members, victim);
      shared.copy_(numbers_of(rank, shared.numel()));
      all_reduce(shared);
      EXPECT_TRUE(at::equal(shared, sum_of(members, shared.numel())));
      expect_whole_world(rank, members);
    }
    EXPECT_EQ(default_group()->getGroupName(), "default:shrunk:3");
    EXPECT_THAT(message_of<c10::ValueError>([] { shrink_group(); }), HasSubstr("at least 2 ranks"));
  });
}

TEST(ShrinkGroup, SeveralDieAtOnce) {
  run_survivors(5, {0, 1, 4}, [](int rank) {
    auto world = init_process_group();
    barrier();
    if (rank == 0 || rank == 1 || rank == 4) die();
    message_of([] { barrier(); });
    shrink_group();
    expect_whole_world(rank, {2, 3});
  });
}

class DeathInShrinkGroup : public ::testing::TestWithParam<const char*> {};

TEST_P(DeathInShrinkGroup, IsNoticedByTheOthersWhoGoOnWithoutItToo) {
  for (const int second : {0, 2}) {
    run_survivors(4, {1, second}, [&](int rank) {
      auto world = init_process_group();
      barrier();
      if (rank == 1) die();
      message_of([] { barrier(); });
      if (rank == second) failpoint::configure(std::string(GetParam()) + "=kill(9)");
      go_on_until(2);
      expect_whole_world(rank, {second == 0 ? 2 : 0, 3});
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Places, DeathInShrinkGroup,
                         ::testing::Values("shrink", "shrink_entered", "shrink_agreed", "shrink_joined",
                                           "announce", "shrink_made"));

TEST(ShrinkGroup, RanksDieAtRandomMomentsAndTheOthersNeverDisagree) {
  const int runs = testing::long_run() ? 40 : 4;
  for (int run = 0; run < runs; ++run) {
    const uint64_t seed = testing::test_seed() * 1000 + static_cast<uint64_t>(run);
    std::vector<int> order(5);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 random(seed);
    for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[random() % (i + 1)]);
    const std::vector<int> victims(order.begin(), order.begin() + 3);
    std::vector<int> survivors(order.begin() + 3, order.end());
    std::sort(survivors.begin(), survivors.end());
    run_survivors(5, victims,
                  [&](int rank) {
                    SCOPED_TRACE("LOCKSTEP_TEST_SEED=" + std::to_string(testing::test_seed()) + ", run " +
                                 std::to_string(run));
                    auto world = init_process_group();
                    at::Tensor state = empty_shared({30'000}).fill_(rank);
                    const bool dies = std::find(victims.begin(), victims.end(), rank) != victims.end();
                    barrier();
                    if (dies) die_soon(seed + static_cast<uint64_t>(rank));
                    // A step counts for all or for none, so all survivors count the same.
                    int64_t steps = 0;
                    int64_t last_steps = 0;
                    while (last_steps < 20) {
                      try {
                        const at::Tensor input = at::sin(state + static_cast<double>(steps));
                        at::Tensor work = empty_shared({state.numel()}).copy_(input);
                        auto handle = all_reduce(work, ReduceOp::SUM, {}, /*async_op=*/true);
                        handle->wait();
                        state.copy_(work);
                        ++steps;
                        if (get_world_size() == 2) ++last_steps;
                      } catch (const c10::DistBackendError&) {
                        shrink_group();
                        // A rank that is behind by a step takes the state of one that is ahead: here all are
                        // level.
                        at::Tensor counts = at::empty({get_world_size()}, at::kLong);
                        try {
                          all_gather_into_tensor(counts, at::full({1}, steps, at::kLong));
                          EXPECT_EQ(counts.min().item<int64_t>(), counts.max().item<int64_t>());
                        } catch (const c10::DistBackendError&) {
                          // Another one has died; the next step says so again.
                        }
                      }
                    }
                    EXPECT_EQ(get_world_size(), 2);
                    at::Tensor all = at::empty({2, state.numel()});
                    all_gather_into_tensor(all, state);
                    EXPECT_TRUE(at::equal(all[0], all[1]));
                    expect_whole_world(rank, survivors);
                  },
                  {.environment = testing::seed_environment(testing::test_seed())});
    if (::testing::Test::HasFailure()) break;
  }
}

// ---- other failures

TEST(ShrinkGroup, AfterAnAbortOrAMismatchAllGoOnInAFreshGroup) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    at::Tensor tensor = at::ones({1000});
    if (rank == 0) abort();
    message_of([&] { all_reduce(tensor); });
    shrink_group();
    expect_whole_world(rank, {0, 1, 2});

    message_of([&] { rank == 1 ? barrier() : all_reduce(tensor); });
    shrink_group({});
    expect_whole_world(rank, {0, 1, 2});
    EXPECT_EQ(default_group()->getGroupName(), "default:shrunk:2");

    // Nothing has failed at all.
    shrink_group({}, {}, SHRINK_DEFAULT, {.timeout = 7s});
    expect_whole_world(rank, {0, 1, 2});
    EXPECT_EQ(registry::require_world()->timeout(), 7s);
  });
}

TEST(ShrinkGroup, StoppedRankIsListedAndLearnsThatItWasLeftBehind) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto pids = all_gather_values(::getpid());
    set_group_timeout(1s);
    if (rank == 1) {
      failpoint::configure("announce=kill(19)@1");
      EXPECT_THAT(message_of([] { barrier(); }), HasSubstr("timed out"));
      const auto text = message_of([] { shrink_group(); });
      EXPECT_THAT(text, HasSubstr("shrink_group failed on rank 1 of group 'default': ranks 0 and 2 (pid"));
      EXPECT_THAT(text, HasSubstr("went on without this rank"));
      return;
    }
    EXPECT_THAT(message_of<DistTimeoutError>([] { barrier(); }), HasSubstr("rank 1"));
    shrink_group({1}, {}, SHRINK_ABORT, {.timeout = 60s});
    expect_whole_world(rank, {0, 2});
    if (rank == 0) ::kill(pids[1], SIGCONT);
  });
}

TEST(ShrinkGroup, LivingRankThatIsLeftOutIsToldSoByTheOldGroup) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    barrier();
    if (rank == 0) {
      EXPECT_THAT(message_of([] { barrier(); }), HasSubstr("has gone on in a smaller group (shrink_group)"));
      EXPECT_THAT(message_of([] { new_group(); }), HasSubstr("new_group"));
      EXPECT_THAT(message_of([] { shrink_group(); }), HasSubstr("went on without this rank"));
    } else {
      shrink_group({0});
      expect_whole_world(rank, {1, 2});
    }
  });
}

TEST(ShrinkGroup, RankThatLivesAndDoesNotCallIsNamedAtTheTimeout) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto both = new_group({0, 1});
    if (rank == 2) {
      at::Tensor word = at::zeros({1});
      recv(word, 0);
      return;
    }
    set_group_timeout(500ms);
    barrier(both);
    const auto text = message_of<DistTimeoutError>([] { shrink_group(); });
    EXPECT_THAT(text, HasSubstr("rank 2"));
    EXPECT_THAT(text, HasSubstr("ranks_to_exclude"));
    set_group_timeout(60s);
    barrier(both);
    at::Tensor word = at::ones({1});
    if (rank == 0) send(word, 2);  // the old group is still there after an error
    barrier(both);
    shrink_group({2});
    expect_whole_world(rank, {0, 1});
  });
}

TEST(ShrinkGroup, RefusesWhatPyTorchRefuses) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto refused = [](const std::vector<int>& ranks, const ProcessGroup& group = {}, int flags = 0) {
      return message_of<c10::ValueError>([&] { shrink_group(ranks, group, flags); });
    };
    EXPECT_THAT(refused({1}, {}, 2), HasSubstr("Invalid shrink_flags value: 2"));
    EXPECT_THAT(refused({0, 2}), HasSubstr("Rank 2 at index 1 is out of bounds for group size 2"));
    EXPECT_THAT(refused({-1}), HasSubstr("Rank -1 at index 0 is out of bounds"));
    EXPECT_THAT(refused({0, 0}), HasSubstr("Duplicate rank 0 found in ranks_to_exclude at index 1"));
    EXPECT_THAT(refused({0, 1}), HasSubstr("Cannot exclude all 2 ranks from process group"));
    EXPECT_THAT(message_of<c10::Error>([&] { shrink_group({rank}); }),
                HasSubstr("Current rank " + std::to_string(rank) + " is in the exclusion list"));
    EXPECT_THAT(message_of<c10::ValueError>([] { shrink_group({}, {}, SHRINK_DEFAULT, {.timeout = 0ms}); }),
                HasSubstr("the timeout is 0 ms"));
    const auto mine = new_subgroups(1).first;
    EXPECT_THAT(refused({}, mine), HasSubstr("Cannot shrink a process group with size 1"));
    const auto first = new_group({0});
    if (rank == 1) {
      EXPECT_THAT(refused({}, first), HasSubstr("not a member"));
    }
    barrier();
  });
}

// ---- what is around

TEST(ShrinkGroup, FurtherGroupIsShrunkAloneAndTheDefaultGroupLater) {
  run_survivors(4, {2}, [](int rank) {
    auto world = init_process_group();
    const auto rows = new_group({3, 0, 2}, {}, {.group_desc = "rows", .sort_ranks = false});
    const auto others = new_group({0, 1, 3});
    barrier();
    if (rank == 2) die();
    if (rank != 1) {
      message_of([&] { barrier(rows); });
      const auto smaller = shrink_group({}, rows);
      EXPECT_THAT(get_process_group_ranks(smaller), ElementsAre(3, 0));
      EXPECT_EQ(smaller->getGroupName(), rows->getGroupName() + ":shrunk:1");
      EXPECT_EQ(smaller->getGroupDesc(), rows->getGroupName() + ":shrunk");
      EXPECT_THAT(message_of<c10::ValueError>([&] { get_rank(rows); }), HasSubstr("was destroyed"));
      at::Tensor tensor = at::full({1}, rank);
      all_reduce(tensor, ReduceOp::SUM, smaller);
      EXPECT_EQ(tensor.item<float>(), 3);
      barrier(shrink_group({}, smaller));  // a fresh one, though nothing has failed
    }
    barrier(others);
    message_of([] { barrier(); });
    shrink_group();
    expect_whole_world(rank, {0, 1, 3});
  });
}

TEST(ShrinkGroup, PendingOperationsHaveFailedAndTheirMemoryComesBack) {
  run_survivors(3, {1}, [](int rank) {
    auto world = init_process_group();
    barrier();
    const auto in_use = [] { return registry::require_world()->transport->arena().bytes_in_use(); };
    const size_t before = in_use();
    std::vector<Work> works;
    std::vector<at::Tensor> tensors;
    if (rank == 1) failpoint::configure("reduce=kill(9)");
    for (int i = 0; i < 5; ++i) {
      tensors.push_back(empty_shared({200'000}).fill_(1));
      works.push_back(all_reduce(tensors.back(), ReduceOp::SUM, {}, /*async_op=*/true));
    }
    shrink_group();
    for (const auto& work : works) {
      EXPECT_TRUE(work->isCompleted());
      EXPECT_THAT(message_of([&] { work->wait(); }), HasSubstr("rank 1 (pid"));
    }
    works.clear();
    tensors.clear();
    // The failed group's last handle is gone; its memory goes when a group closes once all members have.
    for (int i = 0; i < 3; ++i) {
      barrier();
      shrink_group();
    }
    barrier();
    EXPECT_LE(in_use(), before + 200'000);
    barrier();
  });
}

TEST(ShrinkGroup, WorldMayBeDestroyedAfterwardsAndMadeAnew) {
  run_survivors(3, {1}, [](int rank) {
    {
      auto world = init_process_group();
      barrier();
      if (rank == 1) die();
      message_of([] { barrier(); });
      shrink_group();
      barrier();
    }
    EXPECT_FALSE(is_initialized());
    auto world =
        init_process_group({.rank = rank == 0 ? 0 : 1,
                            .world_size = 2,
                            .store = c10::make_intrusive<c10d::PrefixStore>("again", launcher_store())});
    EXPECT_EQ(default_group()->getGroupName(), "default");
    at::Tensor tensor = at::ones({1});
    all_reduce(tensor);
    EXPECT_EQ(tensor.item<float>(), 2);
  });
}

TEST(ShrinkGroup, MeetingInTheStoreOfADeadRankSaysWhatToDo) {
  run_survivors(3, {0}, [](int rank) {
    auto world = init_process_group({.rank = rank, .world_size = 3, .store = store_in_rank_0(rank)});
    barrier();
    if (rank == 0) die();
    message_of([] { barrier(); });
    shrink_group();
    const auto text = message_of<c10::Error>([] {
      new_group({0, 1}, {}, {.use_local_synchronization = true});
    });
    EXPECT_THAT(text, HasSubstr("which may have ended with the process that held it"));
    expect_whole_world(rank, {1, 2});
  });
}

TEST(ShrinkGroup, BackendOfAProgramThatKeepsGroupsItselfShrinksToo) {
  run_survivors(3, {0}, [](int rank) {
    auto world = init_process_group();  // for its store
    auto store = c10::make_intrusive<c10d::PrefixStore>("own", default_group()->getStore());
    auto backend = open_backend(store, rank, 3, {.group_name = "own", .timeout = 60s});
    barrier();
    if (rank == 0) die();
    EXPECT_TRUE(backend->supportsShrinking());
    auto smaller = backend->shrink({});
    EXPECT_EQ(smaller->getRank(), rank - 1);
    EXPECT_EQ(smaller->getSize(), 2);
    std::vector<at::Tensor> tensors{at::full({1}, rank)};
    smaller->allreduce(tensors)->wait();
    EXPECT_EQ(tensors[0].item<float>(), 3);
    backend->shutdown();
    smaller->shutdown();
  });
}

}  // namespace
}  // namespace lockstep::shrink_group_test
