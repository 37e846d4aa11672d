#include <csignal>
#include <cstdlib>
#include <gmock/gmock.h>
#include <regex>
#include <string>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/groups/open_backend.h>
#include <lockstep/collectives/hosts/cost_model.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/rendezvous/rendezvous.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>

// Groups over pretended hosts: what only they have. What they have in common with groups on one host, the tests of that
// check a second time (HOSTS_TESTS in CMakeLists.txt).
namespace lockstep::hosts_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::run_ranks_collect;
using testing::run_survivors;

class Hosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  }
};

/// Each rank's number, seen by all, through every way that a tensor of this size takes.
void check_sum(const ProcessGroup& group, int64_t numel) {
  double expected = 0;
  for (const int rank : get_process_group_ranks(group)) expected += rank + 1;
  at::Tensor tensor = at::full({numel}, get_rank() + 1.0, at::kDouble);
  all_reduce(tensor, ReduceOp::SUM, group);
  ASSERT_EQ(tensor.min().item<double>(), expected) << numel;
  ASSERT_EQ(tensor.max().item<double>(), expected) << numel;
}

TEST_F(Hosts, AnyNumberOfRanksOnEachInAnyOrder) {
  for (const std::vector<int>& host_of :
       {std::vector<int>{0, 1}, {0, 1, 1}, {0, 1, 1, 1}, {0, 1, 0, 1}, {1, 0, 0, 2}, {0, 0, 1, 2, 1}}) {
    run_ranks(static_cast<int>(host_of.size()), [&](int rank) {
      ::setenv("LOCKSTEP_TEST_HOST", ("host-" + std::to_string(host_of[rank])).c_str(), 1);
      auto world = init_process_group();
      for (const int64_t numel : {1, 1000, 300'001}) check_sum({}, numel);
      const at::Tensor mine = at::full({3}, rank, at::kLong);
      std::vector<at::Tensor> all;
      for (int peer = 0; peer < world.size(); ++peer) all.push_back(at::empty_like(mine));
      all_gather(all, mine);
      for (int peer = 0; peer < world.size(); ++peer) EXPECT_EQ(all[peer][2].item<int64_t>(), peer);
      barrier();
    });
  }
}

TEST_F(Hosts, GroupsWithinOneAndOverSeveralAtOnce) {
  run_ranks(
      4,
      [](int rank) {
        auto world = init_process_group();
        std::vector<ProcessGroup> groups;
        for (const auto& ranks : std::vector<std::vector<int>>{{0, 1}, {2, 3}, {2, 0}, {1, 3}, {3, 0, 1}}) {
          groups.push_back(new_group(ranks, {}, {.sort_ranks = false}));
        }
        if (rank == 0 || rank == 3) {
          groups.push_back(new_group({0, 3}, {}, {.use_local_synchronization = true}));
        }
        groups.push_back(split_group({}, {{1, 2}, {0, 3}}));
        for (int round = 0; round < 10; ++round) {
          for (const auto& group : groups) {
            if (is_member(group)) check_sum(group, 5000);
          }
        }
      },
      {.hosts = 2});
}

TEST_F(Hosts, NcclTakesTheInterfaceThatIsWished) {
  struct Case {
    const char* wished;
    const char* nccls_own;
    const char* expected;
  };
  for (const auto& [wished, nccls_own, expected] :
       {Case{"lo", "", "=lo"}, Case{"127.0.0.0/8", "", "=lo"}, Case{"lo", "eth", "eth"}, Case{"", "", ""}}) {
    run_ranks(
        2,
        [&](int) {
          auto world = init_process_group();
          const char* set = std::getenv("NCCL_SOCKET_IFNAME");
          EXPECT_STREQ(set, expected);
        },
        {.hosts = 2, .environment = {{"LOCKSTEP_SOCKET_IFNAME", wished}, {"NCCL_SOCKET_IFNAME", nccls_own}}});
  }
}

TEST_F(Hosts, AGroupIsMadeAgainAfterItWasDestroyed) {
  run_ranks(4,
            [](int) {
              for (int world = 0; world < 3; ++world) {
                auto default_group = init_process_group();
                for (int round = 0; round < 5; ++round) {
                  auto group = new_group();
                  check_sum(group, 1000);
                  destroy_process_group(group);
                }
              }
            },
            {.hosts = 2});
}

TEST_F(Hosts, ALateRankIsNamedWithItsHostOnAll) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              auto group = new_group({}, 500ms);
              if (rank != 3) {
                EXPECT_THAT(
                    message_of<DistTimeoutError>([&] { all_reduce(at::ones({1}), ReduceOp::SUM, group); }),
                    AllOf(HasSubstr("rank 3"), HasSubstr("on host-1)")));
              }
              barrier();
            },
            {.hosts = 2});
}

TEST_F(Hosts, TooFewPortsAreSaidAtOnce) {
  const auto outcomes = run_ranks_collect(4, [](int) { auto world = init_process_group(); },
                                          {.expected_failures = {0, 1, 2, 3},
                                           .hosts = 2,
                                           .environment = {{"LOCKSTEP_PORT_RANGE", "20000-20001"}}});
  for (const auto& outcome : outcomes) {
    EXPECT_FALSE(outcome.timed_out) << outcome.rank;
    EXPECT_THAT(outcome.exception.value_or(""),
                HasSubstr("no port of LOCKSTEP_PORT_RANGE (20000-20001) is free at 127.0.0.1"));
  }
}

TEST_F(Hosts, DifferentCallsAreNamedOnAll) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              const at::Tensor before = at::full({5000}, rank, at::kFloat);
              at::Tensor tensor = before.clone();
              const auto text = message_of<c10::DistBackendError>(
                  [&] { rank == 2 ? broadcast(tensor, 0) : all_reduce(tensor); });
              EXPECT_THAT(text, AllOf(HasSubstr("rank 2: broadcast"), HasSubstr("rank 3: all_reduce")));
              EXPECT_TRUE(at::equal(tensor, before));
            },
            {.hosts = 2});
}

TEST_F(Hosts, AKilledRankIsNamedOnAll) {
  const auto outcomes = run_ranks_collect(4,
                                          [](int rank) {
                                            auto world = init_process_group();
                                            barrier();
                                            if (rank == 3) testing::die();
                                            while (true) all_reduce(at::ones({1000}));
                                          },
                                          {.expected_failures = {0, 1, 2, 3}, .hosts = 2});
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_FALSE(outcomes[rank].timed_out) << rank;
    EXPECT_THAT(outcomes[rank].exception.value_or(""),
                AllOf(HasSubstr("rank 3 (pid"), HasSubstr("on host-1)")));
  }
}

/// Runs a group of so many ranks on two hosts, the last of which stops itself. What the others then say of it; the first
/// one lets it go on.
void stop_the_last(int ranks, std::chrono::milliseconds timeout,
                   const std::function<void(const std::string& error)>& check) {
  run_ranks(ranks,
            [&](int rank) {
              auto world = init_process_group();
              auto group = new_group({}, timeout);
              std::vector<int> others;
              for (int other = 0; other + 1 < ranks; ++other) others.push_back(other);
              const auto survivors = new_group(others);
              at::Tensor pid = at::full({}, static_cast<int64_t>(::getpid()), at::kLong);
              broadcast(pid, ranks - 1);
              if (rank == ranks - 1) {
                ::raise(SIGSTOP);
                message_of<c10::Error>([&] { all_reduce(at::ones({1}), ReduceOp::SUM, group); });
                return;
              }
              at::Tensor tensor = at::full({5000}, rank, at::kFloat);
              const at::Tensor before = tensor.clone();
              check(message_of<c10::Error>([&] { all_reduce(tensor, ReduceOp::SUM, group); }));
              EXPECT_TRUE(at::equal(tensor, before));
              barrier(survivors);
              if (rank == 0) ::kill(static_cast<pid_t>(pid.item<int64_t>()), SIGCONT);
            },
            {.hosts = 2, .environment = {{"LOCKSTEP_HEARTBEAT_TIMEOUT_SEC", "2"}}});
}

TEST_F(Hosts, AStoppedRankIsNamedAndTheOperationsTimeoutDecides) {
  stop_the_last(4, 5s, [](const std::string& error) {
    EXPECT_THAT(error, AllOf(HasSubstr("timed out"), HasSubstr("rank 3 (pid"), HasSubstr("on host-1)"),
                             HasSubstr("is stopped (by SIGSTOP")));
  });
}

TEST_F(Hosts, AStoppedRankAloneOnItsHostIsUnreachableAtTheLimit) {
  stop_the_last(3, 60s, [](const std::string& error) {
    EXPECT_THAT(error, AllOf(HasSubstr("rank 2 (pid"), HasSubstr("is unreachable: silent for"),
                             HasSubstr("it is stopped, its host is lost, or the wire is cut")));
  });
}

/// The last of so many ranks on two hosts dies in init_process_group(), at a pass of a failpoint. What the others say.
void die_in_init(int ranks, const std::string& failpoint, int pass, const std::string& expected) {
  SCOPED_TRACE(failpoint);
  const int victim = ranks - 1;
  run_survivors(ranks, {victim},
                [&](int rank) {
                  if (rank == victim) failpoint::configure(failpoint + "=kill(9)@" + std::to_string(pass));
                  const auto text =
                      message_of<c10::Error>([] { auto world = init_process_group({.timeout = 5min}); });
                  EXPECT_TRUE(std::regex_search(text, std::regex(expected))) << text;
                },
                {.deadline = 40s, .hosts = 2});
}

TEST_F(Hosts, ADeathInInitIsToldByTheRanksOfThatHost) {
  const std::string end = R"(rank 3 \(pid [0-9]+.*\) (was )?killed by signal 9)";
  die_in_init(4, "peers_connected", 1, end);
  die_in_init(4, "meet_claimed", 3, end);
  die_in_init(4, "meet_counted", 3, end);
  die_in_init(4, "transport_connected", 1, end);
}

TEST_F(Hosts, ADeathInInitOfTheOnlyRankOfAHostIsALostConnection) {
  const std::string wire = R"( on .*\), by UCX .*, at [0-9.]+:[0-9]+\))";
  die_in_init(
      3, "peers_connected", 1,
      R"(rank [01] \(pid [0-9]+)" + wire + R"(, and rank 2 \(pid [0-9]+)" + wire + ", can't pass messages: ");
  const std::string lost = R"(rank 2 \(pid [0-9]+ on .*\) is lost: )";
  die_in_init(3, "meet_claimed", 3, lost);
  die_in_init(3, "transport_connected", 1, lost);
}

/// Rank 4 is slow to notice it by itself: rank 5 tells it, by which it ends, and rank 1 by that. Rank 2 has ended before it
/// could hear anything. So rank 0 depends on what rank 4 tells rank 1 first.
TEST_F(Hosts, AnEndIsToldBeforeWhatItEndsElsewhere) {
  run_survivors(6, {3},
                [](int rank) {
                  if (rank == 4) failpoint::configure("notice_end=delay(4000)");
                  auto world = init_process_group();
                  const auto of_host = new_subgroups(3).first;
                  const auto over_hosts = new_subgroups_by_enumeration({{0, 3}, {1, 4}, {2, 5}}).first;
                  barrier();
                  if (rank == 3) ::raise(SIGKILL);
                  if (rank == 2) return;
                  const auto text = message_of<c10::Error>([&] { barrier(rank < 2 ? over_hosts : of_host); });
                  const std::string end = rank == 1
                                              ? R"(rank 4 \(pid [0-9]+ on .*\) (has )?left)"
                                              : R"(rank 3 \(pid [0-9]+ on .*\) (was )?killed by signal 9)";
                  EXPECT_TRUE(std::regex_search(text, std::regex(end))) << text;
                },
                {.hosts = 2});
}

/// Rank 0 awaits the end of rank 1's process, to say how it ended, longer than the limit of silence. Rank 2 waits for rank 0.
TEST_F(Hosts, ARankThatAwaitsTheEndOfAnotherAnswersMeanwhile) {
  run_survivors(3, {1},
                [](int rank) {
                  auto world = init_process_group();
                  const auto of_host = new_group({0, 1});
                  const auto over_hosts = new_group({0, 2});
                  const auto pids = all_gather_values(::getpid());
                  barrier();
                  if (rank == 1) {
                    failpoint::configure("notice_end=delay(600000)");  // it takes rank 0 for ended
                    for (int fd = 3; fd < 1024; ++fd) {
                      int domain = 0;
                      socklen_t size = sizeof domain;
                      if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX)
                        ::shutdown(fd, SHUT_RDWR);
                    }
                    while (true) ::pause();
                  }
                  if (rank == 0) {
                    const auto text = message_of<c10::Error>([&] { barrier(of_host); });
                    EXPECT_THAT(text, HasSubstr("has closed its connections, and its process goes on"));
                  }
                  barrier(over_hosts);
                  if (rank == 0) ::kill(pids[1], SIGKILL);
                },
                {.hosts = 2, .environment = {{"LOCKSTEP_HEARTBEAT_TIMEOUT_SEC", "1"}}});
}

TEST_F(Hosts, AbortReachesAll) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              auto group = new_group();
              if (rank == 0) {
                abort(group);
              } else {
                EXPECT_THAT(message_of([&] { barrier(group); }), HasSubstr("aborted by rank 0"));
              }
              barrier();
            },
            {.hosts = 2});
}

TEST_F(Hosts, MessagesOfAnySizeGoEitherWay) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              for (const int64_t numel : {0, 1, 2048, 2049, 1'000'000, 3'000'000}) {
                std::vector<Work> works;
                std::vector<at::Tensor> tensors;
                for (int peer = 0; peer < 4; ++peer) {
                  if (peer == rank) continue;
                  tensors.push_back(at::full({numel}, rank, at::kFloat));
                  works.push_back(isend(tensors.back(), peer));
                  tensors.push_back(at::full({numel}, -1, at::kFloat));
                  works.push_back(irecv(tensors.back(), peer));
                }
                for (const Work& work : works) work->wait();
                size_t at = 1;
                for (int peer = 0; peer < 4; ++peer) {
                  if (peer == rank) continue;
                  EXPECT_TRUE(at::equal(tensors[at], at::full({numel}, peer, at::kFloat))) << numel;
                  at += 2;
                }
              }
            },
            {.hosts = 2});
}

TEST_F(Hosts, ARankThatLeavesEndsItsPeersMessages) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              auto group = new_group();
              if (rank == 0) {
                send(at::ones({1}), 3, group);
                destroy_process_group(group);
              } else if (rank == 3) {
                EXPECT_THAT(message_of<c10::DistBackendError>([&] { recv(at::ones({1}), 0, group, 7); }),
                            AllOf(HasSubstr("rank 0"), HasSubstr("has left the group")));
                at::Tensor sent = at::zeros({1});
                recv(sent, 0, group);
                EXPECT_EQ(sent.item<float>(), 1) << "what it had sent before comes";
              }
              barrier();
            },
            {.hosts = 2});
}

TEST_F(Hosts, GroupWithinAHostShrinksWithoutTheOtherHost) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              auto pairs = new_subgroups(2);
              if (rank % 2 == 0) {
                EXPECT_EQ(get_world_size(shrink_group({1}, pairs.first)), 1);
              }
              check_sum({}, 10);
            },
            {.hosts = 2});
}

/// This rank's model while it lives.
class OwnModel {
 public:
  explicit OwnModel(const hosts::CostModel& model) {
    ::setenv("LOCKSTEP_WIRE_MODEL", folder_.write("model.json", hosts::to_json(model)).c_str(), 1);
  }
  OwnModel(const OwnModel&) = delete;
  OwnModel& operator=(const OwnModel&) = delete;
  ~OwnModel() { ::unsetenv("LOCKSTEP_WIRE_MODEL"); }

 private:
  testing::TemporaryFolder folder_;
};

// Four hosts that reduce in different ways, and so with different bits, if messages cost nothing, or bytes.
constexpr hosts::CostModel kOnlyBytesCost{.wire = {1e-12, 1e-9}, .host = {}};
constexpr hosts::CostModel kOnlyMessagesCost{.wire = {1, 0}, .host = {}};
constexpr int64_t kModelled = 200'000;

at::Tensor modelled_values(int rank) {
  return at::arange(kModelled, at::kFloat).mul(1.0 / (rank + 3));
}

/// Whether it is what the model of rank 0 gives.
void check_modelled(const at::Tensor& sum, const hosts::CostModel& model) {
  const at::Tensor a = modelled_values(0), b = modelled_values(1), c = modelled_values(2),
                   d = modelled_values(3);
  const at::Tensor halving = (a + c) + (b + d), direct = ((a + b) + c) + d;
  ASSERT_FALSE(at::equal(halving, direct));
  const hosts::HostReduction reduction{.hosts = 4, .bytes = sum.nbytes()};
  const bool halves = &model == &kOnlyBytesCost;
  ASSERT_EQ(hosts::choose(reduction, model),
            halves ? hosts::HostAlgorithm::kHalving : hosts::HostAlgorithm::kDirect);
  EXPECT_TRUE(at::equal(sum, halves ? halving : direct));
}

TEST_F(Hosts, TheCostModelOfRank0HoldsForAll) {
  run_ranks(4,
            [](int rank) {
              for (const bool bytes_cost : {true, false}) {
                const OwnModel own((rank == 0) == bytes_cost ? kOnlyBytesCost : kOnlyMessagesCost);
                auto world = init_process_group();
                for (const auto& group : {ProcessGroup(), new_group()}) {
                  at::Tensor sum = modelled_values(rank);
                  all_reduce(sum, ReduceOp::SUM, group);
                  check_modelled(sum, bytes_cost ? kOnlyBytesCost : kOnlyMessagesCost);
                }
                shrink_group();  // and for the same ranks anew
                at::Tensor sum = modelled_values(rank);
                all_reduce(sum);
                check_modelled(sum, bytes_cost ? kOnlyBytesCost : kOnlyMessagesCost);
              }
            },
            {.hosts = 4});
}

TEST_F(Hosts, TheCostModelOfRank0HoldsForBackendsFromAStore) {
  run_ranks(4,
            [](int rank) {
              const OwnModel own(rank == 0 ? kOnlyBytesCost : kOnlyMessagesCost);
              const World world = rendezvous();
              const auto open = [&](const char* name) {
                return open_backend(c10::make_intrusive<c10d::PrefixStore>(name, world.store), rank, 4,
                                    {.group_name = name, .timeout = 30s});
              };
              const auto first = open("first"), second = open("second, with the mapping of the first");
              for (const auto& backend : {first, second}) {
                std::vector<at::Tensor> tensors{modelled_values(rank)};
                backend->allreduce(tensors)->wait();
                check_modelled(tensors[0], kOnlyBytesCost);
              }
            },
            {.hosts = 4});
}

}  // namespace
}  // namespace lockstep::hosts_test
