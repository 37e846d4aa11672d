#include <chrono>
#include <csignal>
#include <gmock/gmock.h>
#include <regex>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// What goes wrong with real processes: every rank that lives must say which rank failed, in which operation,
// and end cleanly.
namespace lockstep::failure_test {
namespace {

using namespace std::chrono_literals;
using testing::expect_survivors;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::run_ranks_collect;
using testing::run_survivors;

struct Death {
  const char* where;  // the failpoint at which rank 1 dies
  int64_t numel;
  bool shared;
};

class DeathInAllReduce : public ::testing::TestWithParam<Death> {};

TEST_P(DeathInAllReduce, IsToldToAllOthersWithRankOperationAndCause) {
  const auto [where, numel, shared] = GetParam();
  run_survivors(3, {1}, [&](int rank) {
    auto world = init_process_group();
    at::Tensor tensor = shared ? empty_shared({numel}).fill_(1) : at::ones({numel});
    for (int i = 0; i < 3; ++i) all_reduce(tensor);
    if (rank == 1) failpoint::configure(std::string(where) + "=kill(9)");
    const auto text = message_of([&] { all_reduce(tensor); });
    EXPECT_THAT(text, HasSubstr("all_reduce (sequence 4"));
    EXPECT_TRUE(std::regex_search(text, std::regex("rank 1 \\(pid [0-9]+\\) (was )?killed by signal 9")))
        << text;
    // The group stays failed, with the first cause, at once.
    EXPECT_THAT(message_of([&] { barrier(); }), HasSubstr("signal 9"));
  });
}

INSTANTIATE_TEST_SUITE_P(Places, DeathInAllReduce,
                         ::testing::Values(Death{"announce", 10, false}, Death{"announce", 100000, true},
                                           Death{"reduce", 100000, true}, Death{"reduce", 500000, false},
                                           Death{"finish", 100000, true}));

class DeathBeforeItsMemoryCame : public ::testing::TestWithParam<int> {};

TEST_P(DeathBeforeItsMemoryCame, IsToldToAllOthers) {
  const int hosts = GetParam();
  if (hosts > 1 && !testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  run_survivors(4, {3},
                [](int rank) {
                  auto world = init_process_group();
                  if (rank == 3) failpoint::configure("send_segment=errno(32);reduce=kill(9)");
                  at::Tensor tensor = empty_shared({1'000'000}).fill_(1);  // more than a segment holds
                  const auto text = message_of([&] { all_reduce(tensor); });
                  EXPECT_TRUE(std::regex_search(
                      text, std::regex("rank 3 \\(pid [0-9]+( on host-1)?\\) (was )?killed by signal 9")))
                      << text;
                  EXPECT_THAT(message_of([&] { barrier(); }), HasSubstr("signal 9"));
                },
                {.hosts = hosts, .environment = {{"LOCKSTEP_SEGMENT_MB", "1"}}});
}

INSTANTIATE_TEST_SUITE_P(On, DeathBeforeItsMemoryCame, ::testing::Values(1, 2),
                         [](const auto& info) { return std::to_string(info.param) + "Hosts"; });

class DeathAfterItsAnnouncement : public ::testing::TestWithParam<int> {};

// The last of those that live to come has heard of the death before, and rank 0 never comes: it waits for that one.
TEST_P(DeathAfterItsAnnouncement, EndsTheOperationOnceAnotherRankComes) {
  const int hosts = GetParam();
  if (hosts > 1 && !testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  run_survivors(4, {3},
                [](int rank) {
                  auto world = init_process_group();
                  at::Tensor tensor = at::ones({100'000});
                  if (rank == 3) failpoint::configure("announced=kill(9)");
                  if (rank == 2) {
                    EXPECT_THAT(message_of([&] { recv(tensor); }), HasSubstr("signal 9"));
                  }
                  const auto text = message_of([&] {
                    if (rank == 0) {
                      recv(tensor, 2);
                    } else {
                      barrier();
                    }
                  });
                  EXPECT_TRUE(std::regex_search(
                      text, std::regex("rank 3 \\(pid [0-9]+( on host-1)?\\) (was )?killed by signal 9")))
                      << text;
                },
                {.hosts = hosts});
}

INSTANTIATE_TEST_SUITE_P(On, DeathAfterItsAnnouncement, ::testing::Values(1, 2),
                         [](const auto& info) { return std::to_string(info.param) + "Hosts"; });

TEST(Failure, EndsInOtherWaysAreNamedToo) {
  struct End {
    const char* action;
    const char* words;
  };
  for (const End& end :
       {End{"announce=exit(3)", "exited with status 3"}, End{"announce=kill(11)", "signal 11"},
        End{"announce=kill(6)", "signal 6"}, End{"announce=kill(15)", "signal 15"}}) {
    auto outcomes = run_ranks_collect(2,
                                      [&](int rank) {
                                        auto world = init_process_group();
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
                                        // Their handlers would end the process with a status of their own.
                                        std::signal(SIGSEGV, SIG_DFL);
#endif
                                        if (rank == 1) failpoint::configure(end.action);
                                        EXPECT_THAT(message_of([&] { barrier(); }), HasSubstr(end.words));
                                      },
                                      {.expected_failures = {1}});
    expect_survivors(outcomes, {1});
  }
}

TEST(Failure, ExceptionThatEndsARankIsNoticed) {
  auto outcomes = run_ranks_collect(2,
                                    [](int rank) {
                                      auto world = init_process_group();
                                      if (rank == 1) throw std::runtime_error("out of ideas");
                                      const auto text = message_of([] { barrier(); });
                                      EXPECT_THAT(text, HasSubstr("rank 1"));
                                    },
                                    {.expected_failures = {1}});
  expect_survivors(outcomes, {1});
}

TEST(Failure, StoppedRankIsNamedAtTheTimeout) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    auto group = new_group();
    group->getBackend(at::kCPU)->setTimeout(500ms);  // of operations: making the group may take longer
    at::Tensor tensor = at::ones({10});
    all_reduce(tensor, ReduceOp::SUM, group);
    if (rank == 2) {
      // Not there for this operation: as good as stopped, and can tell the others when it may go on.
      barrier();
      EXPECT_THAT(message_of<DistTimeoutError>([&] { all_reduce(tensor, ReduceOp::SUM, group); }),
                  HasSubstr("timed out"));
      return;
    }
    const at::Tensor before = tensor.clone();
    const auto text = message_of<DistTimeoutError>([&] { all_reduce(tensor, ReduceOp::SUM, group); });
    EXPECT_THAT(text, HasSubstr("rank 2"));
    EXPECT_THAT(text, HasSubstr("sequence 2"));
    EXPECT_TRUE(at::equal(before, tensor));
    barrier();
  });
}

TEST(Failure, SigstoppedProcessTimesOutAndIsNamed) {
  auto outcomes = run_ranks_collect(2, [](int rank) {
    auto world = init_process_group();
    const auto pids = all_gather_values(::getpid());
    default_group()->getBackend(at::kCPU)->setTimeout(800ms);
    if (rank == 1) failpoint::configure("announce=kill(19)");
    try {
      barrier();
      ADD_FAILURE() << "should have timed out";
    } catch (const DistTimeoutError& error) {
      EXPECT_THAT(error.what(), HasSubstr(rank == 0 ? "rank 1" : "timed out"));
    }
    if (rank == 0) ::kill(pids[1], SIGCONT);
  });
  expect_survivors(outcomes);
}

struct Mismatch {
  const char* name;
  void (*call)(int rank, const at::Tensor& tensor);
  const char* one;
  const char* other;
};

class MismatchedCalls : public ::testing::TestWithParam<Mismatch> {};

TEST_P(MismatchedCalls, AreExplainedOnEveryRankAndChangeNoByte) {
  for (int ranks : {2, 10}) {
    run_ranks(ranks, [](int rank) {
      auto world = init_process_group();
      at::Tensor tensor = empty_shared({3000, 2}).fill_(rank + 1);
      // Only the last rank differs.
      const int who = rank == world.size() - 1 ? 1 : 0;
      const auto text = message_of([&] { GetParam().call(who, tensor); });
      EXPECT_THAT(text, HasSubstr(GetParam().one));
      EXPECT_THAT(text, HasSubstr(GetParam().other));
      EXPECT_TRUE(at::equal(tensor, at::full({3000, 2}, rank + 1.0)));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, MismatchedCalls,
    ::testing::Values(
        Mismatch{"operation",
                 [](int who, const at::Tensor& t) { who == 0 ? all_reduce(t) : broadcast(t, 0); },
                 "all_reduce(SUM, Float [3000, 2])", "broadcast(Float [3000, 2], src 0)"},
        Mismatch{"shape",
                 [](int who, const at::Tensor& t) { all_reduce(who == 0 ? t : t.narrow(0, 0, 2999)); },
                 "[3000, 2]", "[2999, 2]"},
        Mismatch{"dtype", [](int who, const at::Tensor& t) { all_reduce(who == 0 ? t : t.view(at::kInt)); },
                 "Float", "Int"},
        Mismatch{
            "reduce",
            [](int who, const at::Tensor& t) { all_reduce(t, who == 0 ? ReduceOp::MAX : ReduceOp::MIN); },
            "MAX", "MIN"},
        Mismatch{"root", [](int who, const at::Tensor& t) { broadcast(t, who); }, "src 0", "src 1"},
        Mismatch{"barrier", [](int who, const at::Tensor& t) { who == 0 ? all_reduce(t) : barrier(); },
                 "all_reduce(", "barrier()"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Failure, AbortEndsAllWaitsAtOnce) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    auto group = new_group();
    if (rank == 0) {
      auto work = barrier(group, /*async_op=*/true);
      group->getBackend(at::kCPU)->abort();
      EXPECT_THAT(message_of([&] { work->wait(); }), HasSubstr("aborted by rank 0"));
    } else if (rank == 1) {
      EXPECT_THAT(message_of([&] { barrier(group); }), HasSubstr("aborted by rank 0"));
    }
    barrier();  // the default group is not touched
  });
}

TEST(Failure, LeavingWhileOthersGoOnIsAnErrorForThem) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto group = new_group();
    barrier(group);
    if (rank == 1) {
      destroy_process_group(group);
    } else {
      EXPECT_THAT(message_of([&] { barrier(group); }), HasSubstr("has left the group"));
    }
    barrier();
  });
}

TEST(Failure, ForkedChildIsToldAndTheParentGoesOn) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    at::Tensor tensor = at::ones({4});
    all_reduce(tensor);
    const pid_t child = ::fork();
    if (child == 0) {
      int status = 1;
      try {
        all_reduce(tensor);
      } catch (const c10::DistBackendError& error) {
        status = std::string(error.what()).find("forked process") != std::string::npos ? 42 : 2;
      }
      destroy_process_group();  // must neither hang nor disturb the parent's peers
      ::_exit(status);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), 42);
    all_reduce(tensor);
    EXPECT_EQ(tensor[0].item<float>(), 4);
  });
}

TEST(Failure, UnwaitedOperationsDoNotHangTheEnd) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    at::Tensor tensor = at::full({100000}, rank, at::kFloat);
    all_reduce(tensor, ReduceOp::SUM, {}, true);
  });
}

}  // namespace
}  // namespace lockstep::failure_test
