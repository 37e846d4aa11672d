#include <functional>
#include <gmock/gmock.h>
#include <iostream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/log.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// Making groups and asking about them. What is expected of names, counts and errors was read from
// torch/distributed/distributed_c10d.py.
namespace lockstep::groups_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::run_ranks;
using testing::run_ranks_collect;
using testing::sum_of_ranks;

/// Keys in the store behind the default group.
int64_t keys_in_store() {
  return default_group()->getStore()->getNumKeys();
}

TEST(Groups, QueriesWithoutADefaultGroupSaySo) {
  EXPECT_TRUE(is_available());
  EXPECT_FALSE(is_initialized());
  const std::vector<std::function<void()>> queries = {
      [] { get_rank(); },
      [] { get_world_size(); },
      [] { get_backend(); },
      [] { get_backend_config(); },
      [] { get_pg_count(); },
      [] { get_process_group_ranks(); },
      [] { get_group_rank({}, 0); },
      [] { get_global_rank({}, 0); },
      [] { default_group(); },
      [] { new_group(); },
      [] { new_subgroups(1); },
      [] { new_subgroups_by_enumeration({{0}}); },
      [] { split_group({}, {{0}}); },
      [] { set_group_timeout(1s); },
      [] { abort(); },
  };
  for (const auto& query : queries) {
    EXPECT_THAT(message_of<c10::ValueError>(query), HasSubstr("please make sure to call init_process_group"));
  }
  destroy_process_group();  // nothing to do
}

TEST(Groups, BackendsAreKnownByName) {
  for (const char* name : {"lockstep", "LockStep", "cpu:lockstep", "gloo", "cpu:Gloo"}) {
    EXPECT_TRUE(is_backend_available(name)) << name;
  }
  for (const char* name : {"mpi", "", "cpu:mpi", "cpu:nccl", "tpu:lockstep", "tpu:gloo"}) {
    EXPECT_FALSE(is_backend_available(name)) << name;
  }
  for (const char* name : {"nccl", "NCCL", "cuda:nccl", "cpu:lockstep,cuda:nccl"}) {
    EXPECT_EQ(is_backend_available(name), is_nccl_available()) << name;
  }
  for (const char* malformed : {"cpu:", ":lockstep", "cpu:lockstep,", "cpu:lockstep,lockstep", "a:b:c"}) {
    EXPECT_THAT(message_of<c10::ValueError>([&] { is_backend_available(malformed); }),
                HasSubstr("Invalid device:backend pairing"));
  }
  EXPECT_THAT(message_of<c10::ValueError>([] { is_backend_available("cpu:lockstep,cpu:gloo"); }),
              HasSubstr("Duplicate device type cpu"));
  EXPECT_EQ(get_default_backend_for_device(at::kCPU), "lockstep");
  EXPECT_EQ(get_default_backend_for_device(at::Device("cuda:0")), is_nccl_available() ? "nccl" : "lockstep");
  EXPECT_THAT(message_of<c10::ValueError>([] { get_default_backend_for_device(at::kMeta); }),
              HasSubstr("Default backend not registered for device : meta"));
  {
    auto world = init_process_group({.backend = "gloo", .rank = 0, .world_size = 1});
    EXPECT_EQ(get_backend(), "lockstep");
  }
  auto world = init_process_group({.backend = "CPU:lockstep", .rank = 0, .world_size = 1});
  EXPECT_EQ(get_backend(), "cpu:lockstep");
  EXPECT_EQ(get_backend_config(), "cpu:lockstep");
  EXPECT_EQ(get_backend(new_group({}, {}, {.backend = "lockstep"})), "lockstep");
  EXPECT_EQ(get_backend(new_group({}, {}, {.backend = "cpu:gloo"})), "cpu:lockstep");
  EXPECT_THROW(new_group({}, {}, {.backend = "mpi"}), c10::ValueError);
}

TEST(Groups, LocalRankIsTheLaunchersOrTheFallback) {
  const auto with = [](std::vector<std::pair<std::string, std::optional<std::string>>> environment,
                       auto check) {
    run_ranks(1, [&](int) { check(); }, {.environment = std::move(environment)});
  };
  with({{"LOCAL_RANK", "3"}}, [] { EXPECT_EQ(get_node_local_rank(7), 3); });
  with({{"LOCAL_RANK", "three"}}, [] { EXPECT_THROW(get_node_local_rank(7), c10::ValueError); });
  with({{"LOCAL_RANK", std::nullopt}}, [] {
    EXPECT_EQ(get_node_local_rank(7), 7);
    EXPECT_THAT(message_of<c10::Error>([] { get_node_local_rank(); }),
                HasSubstr("LOCAL_RANK is not in the environment"));
  });
  with({{"LOCAL_RANK", std::nullopt},
        {"RANK", std::nullopt},
        {"WORLD_SIZE", std::nullopt},
        {"OMPI_COMM_WORLD_RANK", "5"},
        {"OMPI_COMM_WORLD_SIZE", "6"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "2"}},
       [] { EXPECT_EQ(get_node_local_rank(7), 2); });
  // By hand, without LOCAL_RANK.
  run_ranks(2,
            [](int rank) {
              auto world = init_process_group();
              EXPECT_EQ(get_node_local_rank(7), rank);
            },
            {.environment = {{"LOCAL_RANK", std::nullopt}, {"LOCAL_WORLD_SIZE", std::nullopt}}});
  with({{"TORCHELASTIC_RUN_ID", std::nullopt}}, [] { EXPECT_FALSE(is_torchelastic_launched()); });
  with({{"TORCHELASTIC_RUN_ID", "none"}}, [] { EXPECT_TRUE(is_torchelastic_launched()); });
}

TEST(Groups, QueriesAnswerAsInPython) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    EXPECT_EQ(get_backend(), "lockstep");
    EXPECT_EQ(get_backend_config(), "cpu:lockstep,cuda:lockstep");
    EXPECT_EQ(get_pg_count(), 1);
    EXPECT_THAT(get_process_group_ranks(), ElementsAre(0, 1, 2, 3));
    EXPECT_EQ(default_group()->getGroupName(), "default");
    EXPECT_EQ(default_group()->getGroupDesc(), "default_pg");
    EXPECT_EQ(get_group_rank(default_group(), 2), 2);
    EXPECT_EQ(get_global_rank({}, 3), 3);

    auto sorted = new_group({3, 1});
    auto listed = new_group({3, 1}, 5s, {.group_desc = "by hand", .sort_ranks = false, .group_name = "odd"});
    EXPECT_EQ(get_pg_count(), 3) << "on those who are not members, too";
    if (rank % 2 == 0) {
      for (const auto& group : {sorted, listed}) {
        EXPECT_FALSE(is_member(group));
        EXPECT_EQ(get_rank(group), -1);
        EXPECT_EQ(get_world_size(group), -1);
        for (const std::function<void()>& refused : std::vector<std::function<void()>>{
                 [&] { get_backend(group); }, [&] { get_process_group_ranks(group); },
                 [&] { get_group_rank(group, 1); }, [&] { set_group_timeout(1s, group); },
                 [&] { split_group(group, {{0}}); }, [&] { empty_shared({1}, {}, group); }}) {
          EXPECT_THAT(message_of<c10::ValueError>(refused),
                      AllOf(HasSubstr("Invalid process group specified"), HasSubstr("not a member")));
        }
        EXPECT_THROW(barrier(group), c10::ValueError);
        destroy_process_group(group);  // nothing to do, as in Python
        abort(group);
      }
      return;
    }
    EXPECT_THAT(get_process_group_ranks(sorted), ElementsAre(1, 3));
    EXPECT_THAT(get_process_group_ranks(listed), ElementsAre(3, 1));
    EXPECT_EQ(get_rank(sorted), rank / 2);
    EXPECT_EQ(get_rank(listed), 1 - rank / 2);
    EXPECT_EQ(get_world_size(listed), 2);
    EXPECT_EQ(get_group_rank(listed, 1), 1);
    EXPECT_EQ(get_global_rank(listed, 0), 3);
    EXPECT_EQ(sorted->getGroupName(), "1");
    EXPECT_EQ(sorted->getGroupDesc(), "undefined");
    EXPECT_EQ(listed->getGroupName(), "odd");
    EXPECT_EQ(listed->getGroupDesc(), "by hand");
    EXPECT_EQ(get_backend_config(listed), "cpu:lockstep,cuda:lockstep");
    EXPECT_THAT(message_of<c10::ValueError>([&] { get_group_rank(sorted, 2); }),
                HasSubstr("Global rank 2 is not part of group '1', which has ranks 1 and 3"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { get_global_rank(sorted, 2); }),
                HasSubstr("Group rank 2 is not part of group"));
    EXPECT_EQ(sum_of_ranks(listed), 4);
  });
}

TEST(Groups, BadArgumentsAreRefusedBeforeAnybodyIsWaitedFor) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    if (rank == 1) {
      barrier();  // so rank 0 can't be waiting for it
      return;
    }
    EXPECT_THAT(message_of<c10::ValueError>([] {
                  new_group({0, 0});
                }),
                HasSubstr("duplicate entries, got [0, 0]"));
    EXPECT_THAT(message_of<c10::ValueError>([] { new_group({0, 2}); }), HasSubstr("rank 2 is out of range"));
    EXPECT_THROW(new_group({-1}), c10::ValueError);
    EXPECT_THAT(message_of<c10::ValueError>([] { new_group({}, 0ms); }), HasSubstr("0 ms"));
    EXPECT_THROW(set_group_timeout(-1ms), c10::ValueError);
    EXPECT_THAT(message_of<c10::ValueError>([] { new_subgroups(); }), HasSubstr("pass in 'group_size'"));
    EXPECT_THAT(message_of<c10::ValueError>([] { new_subgroups(0); }), HasSubstr("must be positive"));
    EXPECT_THAT(message_of<c10::ValueError>([] { new_subgroups(3); }),
                HasSubstr("(3) must not exceed the world size (2)"));
    EXPECT_THAT(message_of<c10::ValueError>([] { new_subgroups_by_enumeration({}); }),
                HasSubstr("cannot be empty"));
    EXPECT_THAT(message_of<c10::ValueError>([] {
                  new_subgroups_by_enumeration({{0, 1}, {1}});
                }),
                HasSubstr("Rank 1 has appeared in both subgroup [0, 1] and [1]"));
    EXPECT_THAT(message_of<c10::ValueError>([] { split_group({}, {}); }),
                HasSubstr("split_ranks cannot be None or empty"));
    EXPECT_THAT(message_of<c10::ValueError>([] {
                  split_group({}, {{0}, {}});
                }),
                HasSubstr("the split group cannot be empty"));
    EXPECT_THAT(message_of<c10::ValueError>([] {
                  split_group({}, {{0, 0}});
                }),
                HasSubstr("the split group cannot have duplicate ranks"));
    EXPECT_THROW(split_group({}, {{0, 1}, {1}}), c10::ValueError);
    EXPECT_THROW(split_group({}, {{2}}), c10::ValueError);
    EXPECT_EQ(get_pg_count(), 1);
    barrier();
  });
}

TEST(Groups, SubgroupsCutTheWorld) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    auto [pair, pairs] = new_subgroups(2, {}, {}, {.group_desc = "pairs"});
    ASSERT_EQ(pairs.size(), 2u);
    EXPECT_EQ(pair, pairs[rank / 2]);
    EXPECT_FALSE(is_member(pairs[1 - rank / 2]));
    EXPECT_THAT(get_process_group_ranks(pair), ElementsAre(rank / 2 * 2, rank / 2 * 2 + 1));
    EXPECT_EQ(pair->getGroupDesc(), "pairs");
    EXPECT_EQ(sum_of_ranks(pair), rank / 2 * 4 + 1);
    EXPECT_THAT(message_of<c10::ValueError>([&] { new_subgroups(3); }),
                HasSubstr("The world size (4) must be divisible by 'group_size=3'"));

    auto [mine, all] = new_subgroups_by_enumeration({{3, 0}, {1}});
    EXPECT_EQ(is_member(mine), rank != 2);
    if (rank == 0 || rank == 3) {
      EXPECT_EQ(sum_of_ranks(mine), 3);
    }
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  new_subgroups_by_enumeration({{0}, {1}}, {}, {.group_name = "twins"});
                }),
                HasSubstr("'twins'"));

    auto wide = new_group({0, 1, 2, 3});
    auto halves = new_subgroups(2, wide);
    EXPECT_EQ(sum_of_ranks(halves.first), rank / 2 * 4 + 1);
    for (const auto& group : pairs) destroy_process_group(group);
    EXPECT_THROW(get_rank(pair), c10::ValueError);
    EXPECT_EQ(sum_of_ranks({}), 6);
  });
}

TEST(Groups, SplitsOfTheDefaultGroupAndOfOthers) {
  run_ranks(5, [](int rank) {
    auto world = init_process_group();
    const int64_t keys = keys_in_store();
    auto part = split_group({}, {{4, 0, 2}, {3}});  // rank 1 is in none
    EXPECT_EQ(is_member(part), rank != 1);
    EXPECT_EQ(get_pg_count(), 1) << "splits have names of their own, as in Python";
    if (rank == 1) {
      EXPECT_THAT(message_of<c10::ValueError>([&] { split_group(part, {{0}}); }), HasSubstr("not a member"));
    } else if (rank == 3) {
      EXPECT_EQ(sum_of_ranks(part), 3);
      EXPECT_EQ(part->getGroupName(), "default:split:0:1");
    } else {
      EXPECT_EQ(part->getGroupName(), "default:split:0:0");
      EXPECT_EQ(part->getGroupDesc(), "default_pg:split:0");
      EXPECT_EQ(sum_of_ranks(part), 6);
      // Only the parent's members take part, and lists hold its group ranks.
      auto outer = split_group(part, {{2, 0}}, 5s, "outer");
      EXPECT_EQ(is_member(outer), rank != 2);
      if (rank != 2) {
        EXPECT_THAT(get_process_group_ranks(outer), ElementsAre(0, 4));
        EXPECT_EQ(outer->getGroupDesc(), "outer");
        EXPECT_EQ(sum_of_ranks(outer), 4);
      }
      EXPECT_EQ(sum_of_ranks(part), 6) << "the parent goes on";
      // The ranks that disagree are told, and the parent remains usable.
      const auto text = message_of<c10::DistBackendError>([&] {
        split_group(part, {{0, rank == 4 ? 2 : 1}});
      });
      EXPECT_THAT(text, AllOf(HasSubstr("ranks 0 and 2: split_group(parent 'default:split:0:0', [[0, 1]])"),
                              HasSubstr("rank 4: split_group(parent 'default:split:0:0', [[0, 2]])")));
      EXPECT_EQ(sum_of_ranks(part), 6);
    }
    barrier();
    EXPECT_EQ(keys_in_store(), keys);
  });
}

TEST(Groups, LocalSynchronizationNeedsOnlyTheMembers) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    barrier();
    const int64_t keys = keys_in_store();
    barrier();
    if (rank != 1) {
      for (int round = 0; round < 3; ++round) {
        auto group = new_group({0, 2, 3}, {}, {.use_local_synchronization = true});
        EXPECT_EQ(sum_of_ranks(group), 5);
        EXPECT_EQ(group->getGroupName(), "local ranks 0, 2 and 3 #" + std::to_string(round));
      }
      auto alone = new_group({rank}, {}, {.use_local_synchronization = true});
      EXPECT_EQ(sum_of_ranks(alone), rank);
      EXPECT_FALSE(is_member(new_group({1}, {}, {.use_local_synchronization = true})));
      // Who means something else is named.
      if (rank != 3) {
        const auto text = message_of<c10::DistBackendError>([&] {
          new_group({0, 2}, {},
                    {.use_local_synchronization = true, .group_name = rank == 0 ? "left" : "right"});
        });
        EXPECT_THAT(text, AllOf(HasSubstr("'left'"), HasSubstr("'right'")));
      }
    }
    EXPECT_EQ(get_pg_count(), 1);
    barrier();
    // What disagreed stays in the store: a rank that failed can't know whether the others have read it.
    EXPECT_LE(keys_in_store(), keys + 12);
    barrier();
    EXPECT_EQ(sum_of_ranks(new_group()), 6);
  });
}

TEST(Groups, MakingThemLeavesNothingInTheStoreAndTheDefaultGroupAlone) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    std::vector<ProcessGroup> groups = {new_group()};
    barrier(groups[0]);  // what rank 0 does after init is done
    const int64_t keys = keys_in_store();
    barrier(groups[0]);
    for (int i = 0; i < 10; ++i) groups.push_back(new_group());
    for (int i = 0; i < 5; ++i) {
      groups.push_back(new_group({0, 1}, {}, {.use_local_synchronization = true}));
    }
    for (const auto& group : groups) EXPECT_EQ(sum_of_ranks(group), 1);
    // The default group's first operation has number 1.
    const auto text =
        message_of<c10::DistBackendError>([&] { rank == 0 ? barrier() : all_reduce(at::ones({1})); });
    EXPECT_THAT(text, HasSubstr("sequence 1"));
    barrier(groups[0]);  // rank 0 has deleted the last local group's keys by now
    EXPECT_EQ(keys_in_store(), keys);
    barrier(groups[0]);
  });
}

TEST(Groups, DifferentRequestsAreNamedOnAllRanksAndBreakNothing) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    auto text = message_of<c10::DistBackendError>([&] {
      new_group(rank == 1 ? std::vector{0, 1} : std::vector{0, 2});
    });
    EXPECT_THAT(text, AllOf(HasSubstr("ranks 0 and 2: new_group(ranks 0 and 2, name '1')"),
                            HasSubstr("rank 1: new_group(ranks 0 and 1, name '1')"),
                            HasSubstr("the same groups in the same order")));
    text = message_of<c10::DistBackendError>([&] {
      rank == 2 ? split_group({}, {{0}, {1, 2}}) : new_group({2, 1, 0}, {}, {.sort_ranks = false});
    });
    EXPECT_THAT(text, AllOf(HasSubstr("ranks 0 and 1: new_group(ranks [2, 1, 0], name '2')"),
                            HasSubstr("rank 2: split_group(parent 'default', [[0], [1, 2]])")));
    // A rank that can't take part is not waited for either.
    auto group = new_group({0, 1}, {}, {.group_name = "pair"});
    text = message_of<c10::ValueError>([&] { new_group({1, 2}, {}, {.group_name = "pair"}); });
    EXPECT_THAT(text, HasSubstr("a group named 'pair' exists already"));
    destroy_process_group(group);
    EXPECT_TRUE(is_initialized());
    auto again = new_group({1, 2}, {}, {.group_name = "pair"});
    if (rank != 0) {
      EXPECT_EQ(sum_of_ranks(again), 3);
    }
    EXPECT_EQ(sum_of_ranks({}), 3);
  });
}

TEST(Groups, TimeoutsAreTheGroupsOwn) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto hasty = new_group({}, 200ms, {.group_name = "hasty"});
    auto patient = new_group({}, {}, {.group_name = "patient"});
    auto changed = new_group({}, {}, {.group_name = "changed"});
    set_group_timeout(200ms, changed);
    for (const auto& group : {hasty, changed}) {
      if (rank == 0) {
        EXPECT_THAT(message_of<DistTimeoutError>([&] { barrier(group); }),
                    AllOf(HasSubstr("'" + group->getGroupName() + "'"), HasSubstr("rank 1")));
      }
      barrier();  // the default group still works, and keeps rank 1 from coming earlier
      if (rank == 1) {
        EXPECT_THROW(barrier(group), DistTimeoutError);
      }
    }
    EXPECT_EQ(sum_of_ranks(patient), 1);
    EXPECT_EQ(sum_of_ranks(new_group()), 1);
  });
}

TEST(Groups, TheDefaultGroupsTimeoutBoundsTheMaking) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto other = new_group();
    set_group_timeout(300ms);
    if (rank == 0) {
      EXPECT_THAT(message_of<DistTimeoutError>([] { new_group({0}); }),
                  AllOf(HasSubstr("new_group(rank 0, name '2') failed on rank 0"), HasSubstr("rank 1")));
    }
    barrier(other);
    EXPECT_THAT(message_of<DistTimeoutError>([] { new_group(); }), HasSubstr("timed out"));
    set_group_timeout(60s);
    barrier();  // it has other channels
    auto local = new_group({0, 1}, {}, {.use_local_synchronization = true});
    EXPECT_EQ(sum_of_ranks(local), 1);
  });
}

// ---- What is logged

struct LogCase {
  const char* name;
  std::optional<std::string> lockstep_log;
  std::optional<std::string> torch_debug;
  int debug_level;  // -1: refused
  std::string expected;
};

class GroupsLog : public ::testing::TestWithParam<LogCase> {};

TEST_P(GroupsLog, FollowsTorchsDebugLevelUnlessToldOtherwise) {
  const LogCase& wanted = GetParam();
  const auto outcomes = run_ranks_collect(1,
                                          [](int) {
                                            auto world = init_process_group();
                                            std::cerr << "level " << static_cast<int>(get_debug_level())
                                                      << '\n';
                                            auto rows = new_group({0}, {}, {.group_desc = "rows"});
                                            destroy_process_group(rows);
                                          },
                                          {.environment = {{"LOCKSTEP_LOG", wanted.lockstep_log},
                                                           {"TORCH_DISTRIBUTED_DEBUG", wanted.torch_debug}}});
  ASSERT_EQ(outcomes.size(), 1u);
  const std::string& output = outcomes[0].output;
  if (wanted.debug_level < 0) {
    EXPECT_THAT(outcomes[0].exception.value_or(""), HasSubstr(wanted.expected));
    return;
  }
  EXPECT_EQ(outcomes[0].exception.value_or(""), "");
  EXPECT_THAT(output, HasSubstr("level " + std::to_string(wanted.debug_level)));
  if (wanted.expected == "info") {
    EXPECT_THAT(output, AllOf(HasSubstr("lockstep rank 0 info: joined 1 ranks"),
                              HasSubstr("info: made group '1' (rows) of rank 0"),
                              HasSubstr("info: destroys group '1'")));
  } else {
    EXPECT_THAT(output, Not(HasSubstr("info:")));
  }
}

TEST(Log, AVariableThatIsWrongIsToldOnceToAProgramWithoutGroups) {
  const auto outcomes = run_ranks_collect(1,
                                          [](int) {
                                            LOCKSTEP_LOG(kWarning) << "one";
                                            LOCKSTEP_LOG(kInfo) << "two";
                                            LOCKSTEP_LOG(kWarning) << "three";
                                          },
                                          {.environment = {{"LOCKSTEP_LOG", "loud"}}});
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_EQ(outcomes[0].exception.value_or(""), "");
  EXPECT_EQ(outcomes[0].output,
            "lockstep warning: environment variable LOCKSTEP_LOG is 'loud'; it takes error, warning, info or "
            "debug\n"
            "lockstep warning: one\nlockstep warning: three\n");
}

INSTANTIATE_TEST_SUITE_P(
    Levels, GroupsLog,
    ::testing::Values(LogCase{"nothing", {}, {}, 0, ""}, LogCase{"torch_info", {}, "INFO", 1, "info"},
                      LogCase{"torch_detail", {}, "detail", 2, "info"},
                      LogCase{"lockstep_info", "info", {}, 0, "info"},
                      LogCase{"lockstep_error", "error", "DETAIL", 2, ""},
                      LogCase{"wrong_torch",
                              {},
                              "LOUD",
                              -1,
                              "TORCH_DISTRIBUTED_DEBUG is 'LOUD'; it must be OFF, INFO, or DETAIL"},
                      LogCase{"wrong_lockstep", "loud", {}, -1, "it takes error, warning, info or debug"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace lockstep::groups_test
