#include <chrono>
#include <csignal>
#include <gmock/gmock.h>
#include <set>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// What holds once an operation has thrown: its error names the rank that is the cause, and no peer changes a
// byte of this rank's tensors any more.
namespace lockstep::after_error_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::run_ranks;

std::string name_of(int rank, const std::vector<pid_t>& pids) {
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(pids[rank]) + ")";
}

void set_timeout(const ProcessGroup& group, std::chrono::milliseconds timeout) {
  group->getBackend(at::kCPU)->setTimeout(timeout);
}

bool all_are(const at::Tensor& tensor, float value) {
  return tensor.eq(value).all().item<bool>();
}

struct Stop {
  const char* name;
  const char* where;  // the failpoint at which rank 2 stops
  int64_t numel;
  bool shared;
};

class StoppedRank : public ::testing::TestWithParam<Stop> {};

TEST_P(StoppedRank, IsNamedByAllOthersAndChangesNothingWhenItWakes) {
  const Stop stop = GetParam();
  run_ranks(3, [&stop](int rank) {
    auto world = init_process_group();
    const auto pids = all_gather_values(::getpid());
    const auto group = new_group();
    const auto survivors = new_group({0, 1});
    at::Tensor tensor = stop.shared ? empty_shared({stop.numel}).fill_(1) : at::ones({stop.numel});
    all_reduce(tensor, ReduceOp::SUM, group);
    set_timeout(group, 1500ms);
    if (rank == 2) {
      failpoint::configure(std::string(stop.where) + "=kill(19)@1");
      EXPECT_THAT(message_of<DistTimeoutError>([&] { all_reduce(tensor, ReduceOp::SUM, group); }),
                  HasSubstr("timed out"));
      barrier();
      return;
    }
    const auto text = message_of<DistTimeoutError>([&] { all_reduce(tensor, ReduceOp::SUM, group); });
    EXPECT_THAT(text, AllOf(HasSubstr(name_of(2, pids)), HasSubstr("is stopped")));
    EXPECT_THAT(text, Not(HasSubstr("waiting for " + name_of(1 - rank, pids))));
    tensor.fill_(100);
    barrier(survivors);
    if (rank == 0) ::kill(pids[2], SIGCONT);
    barrier();  // rank 2 has done all that it will do in the operation
    EXPECT_TRUE(all_are(tensor, 100)) << "between " << tensor.min() << " and " << tensor.max();
    all_reduce(tensor, ReduceOp::SUM, survivors);
    EXPECT_TRUE(all_are(tensor, 200)) << "between " << tensor.min() << " and " << tensor.max();
  });
}

INSTANTIATE_TEST_SUITE_P(Places, StoppedRank,
                         ::testing::Values(Stop{"small", "announce", 10, false},
                                           Stop{"announcing", "announce", 1'000'000, true},
                                           Stop{"reducing_in_place", "reduce", 1'000'000, true},
                                           Stop{"finishing_in_place", "finish", 1'000'000, true},
                                           Stop{"reducing_staged", "reduce", 1'000'000, false}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(AfterAnError, AbortedPeersChangeNothingAnyMore) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (int round = 0; round < 5; ++round) {
      const auto group = new_group();
      at::Tensor tensor = empty_shared({4'000'000}).fill_(1);
      all_reduce(tensor, ReduceOp::MIN, group);
      std::thread aborter;
      if (rank == 0) aborter = std::thread([&group] { group->getBackend(at::kCPU)->abort(); });
      EXPECT_THAT(message_of([&] {
                    while (true) all_reduce(tensor, ReduceOp::MIN, group);
                  }),
                  HasSubstr("aborted by rank 0"));
      tensor.fill_(777);
      if (aborter.joinable()) aborter.join();
      barrier();  // all have left the operation
      EXPECT_TRUE(all_are(tensor, 777)) << "in round " << round;
      destroy_process_group(group);
    }
  });
}

TEST(AfterAnError, MemoryOfAFailedReductionWorksOnAndIsSharedAgainOnceTheGroupIsGone) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    std::set<const void*> addresses;
    for (int round = 0; round < 20; ++round) {
      const auto group = new_group();
      at::Tensor tensor = empty_shared({1'000'000}).fill_(2);
      addresses.insert(tensor.const_data_ptr());
      all_reduce(tensor, ReduceOp::SUM, group);
      group->getBackend(at::kCPU)->abort();
      message_of([&] { all_reduce(tensor, ReduceOp::SUM, group); });
      // In another group the tensor works, and has kept its value.
      all_reduce(tensor, ReduceOp::SUM);
      EXPECT_TRUE(all_are(tensor, 8)) << "in round " << round;
      destroy_process_group(group);
      barrier();
    }
    EXPECT_LT(addresses.size(), 5u) << "the arena does not get the memory back";
  });
}

TEST(AfterAnError, ARankThatFailsByItselfAndGoesOnIsTheCauseForAll) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (int round = 0; round < 5; ++round) {
      const auto group = new_group();
      at::Tensor tensor = empty_shared({1'000'000}).fill_(1);
      all_reduce(tensor, ReduceOp::SUM, group);
      failpoint::configure(rank == 0 ? "reduce=error(no luck)@1" : "reduce=delay(50)@1");
      const auto first = [&] { all_reduce(tensor, ReduceOp::SUM, group); };
      if (rank == 0) {
        EXPECT_THAT(message_of<c10::Error>(first), HasSubstr("no luck"));
      } else {
        EXPECT_THAT(message_of(first), HasSubstr("aborted by rank 0"));
      }
      // At once, while rank 1 is still in the first.
      EXPECT_THAT(message_of([&] { all_reduce(tensor, ReduceOp::SUM, group); }),
                  HasSubstr("aborted by rank 0"));
      failpoint::configure("");
      destroy_process_group(group);
    }
    barrier();
  });
}

TEST(Timeout, NamesTheRankThatTheLateOneWaitsForInAnotherGroup) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto pids = all_gather_values(::getpid());
    const auto first = new_group({0, 1});
    const auto second = new_group({1, 2});
    if (rank == 0) {
      set_timeout(first, 1500ms);
      const auto text = message_of<DistTimeoutError>([&] { barrier(first); });
      EXPECT_THAT(text, AllOf(HasSubstr(name_of(2, pids)), HasSubstr("is stopped")));
      ::kill(pids[2], SIGCONT);
    } else {
      if (rank == 2) failpoint::configure("announce=kill(19)@1");
      barrier(second);
      if (rank == 1) {
        EXPECT_THAT(message_of([&] { barrier(first); }), HasSubstr(name_of(2, pids)));
      }
    }
    barrier();
  });
}

TEST(Timeout, NamesTheRankThatTheLateOneReceivesFrom) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto pids = all_gather_values(::getpid());
    const auto group = new_group();
    set_timeout(group, 1500ms);
    at::Tensor tensor = at::ones({4});
    if (rank == 0) {
      EXPECT_THAT(message_of<DistTimeoutError>([&] { barrier(group); }),
                  AllOf(HasSubstr(name_of(2, pids)), HasSubstr("is stopped")));
      ::kill(pids[2], SIGCONT);
    } else if (rank == 1) {
      recv(tensor, 2);  // in the world
    } else {
      ::raise(SIGSTOP);
      send(tensor, 1);
    }
    barrier();
  });
}

TEST(Timeout, NamesTheStoppedRankAlsoWhereALowerOneIsLate) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto pids = all_gather_values(::getpid());
    const auto group = new_group();
    set_timeout(group, 1500ms);
    at::Tensor tensor = at::ones({4});
    if (rank == 0) {
      EXPECT_THAT(message_of<DistTimeoutError>([&] { barrier(group); }),
                  AllOf(HasSubstr("waiting for " + name_of(2, pids)), HasSubstr("is stopped")));
      ::kill(pids[2], SIGCONT);
      send(tensor, 1);
    } else if (rank == 1) {
      recv(tensor, 0);  // in the world: it is late for the barrier because of rank 0
    } else {
      ::raise(SIGSTOP);
    }
    barrier();
  });
}

TEST(Timeout, OfAReceiveFromAnyRankNamesTheStoppedOneAlsoOnceAnotherHasLeft) {
  run_ranks(4,
            [](int rank) {
              auto world = init_process_group();
              const auto pids = all_gather_values(::getpid());
              const auto group = new_group();
              barrier(group);  // all have made it
              set_timeout(group, 1500ms);
              at::Tensor tensor = at::ones({4});
              if (rank == 0) {
                message_of([&] { recv(tensor, 1); });  // in the world, until rank 1 has ended
                EXPECT_THAT(
                    message_of<DistTimeoutError>([&] { recv(tensor, {}, group); }),
                    AllOf(HasSubstr("any of ranks 2 and 3"), HasSubstr(name_of(3, pids) + " is stopped")));
                ::kill(pids[3], SIGCONT);
                send(tensor, 2);
              } else if (rank == 1) {
                destroy_process_group(group);
                testing::die();
              } else if (rank == 2) {
                recv(tensor, 0);  // in the world
              } else {
                ::raise(SIGSTOP);
              }
            },
            {.expected_failures = {1}});
}

TEST(Timeout, OfASendToARankThatHasGivenUpItsOwnWaitNamesTheStoppedOne) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto pids = all_gather_values(::getpid());
    const auto group = new_group();
    barrier(group);  // all have made it
    set_timeout(group, 1500ms);
    at::Tensor tensor = at::ones({100'000});  // a send of so much waits for its receiver
    if (rank == 0) {
      recv(tensor, 1);  // in the world: rank 1 has given up
      EXPECT_THAT(message_of<DistTimeoutError>([&] { send(tensor, 1, group); }),
                  AllOf(HasSubstr("waiting for " + name_of(1, pids)),
                        HasSubstr("and " + name_of(2, pids) + " is stopped")));
      ::kill(pids[2], SIGCONT);
      send(tensor, 1);
    } else if (rank == 1) {
      EXPECT_THAT(message_of<DistTimeoutError>([&] { recv(tensor, 2, group); }),
                  HasSubstr("waiting for " + name_of(2, pids) + ", which is stopped"));
      send(tensor, 0);
      recv(tensor, 0);  // in the world: it does not wait for rank 2 any more
    } else {
      ::raise(SIGSTOP);
    }
    barrier();
  });
}

TEST(Mismatch, IsExplainedToLaterCallsAndToMessagesToo) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto group = new_group();
    at::Tensor tensor = at::ones({4}), message = at::ones({4});
    const Work pending = irecv(message, (rank + 1) % 3, group);
    const auto calls = AllOf(HasSubstr("ranks 0 and 2: all_reduce("), HasSubstr("rank 1: barrier()"));
    EXPECT_THAT(message_of([&] { rank == 1 ? barrier(group) : all_reduce(tensor, ReduceOp::SUM, group); }),
                calls);
    EXPECT_THAT(message_of([&] { barrier(group); }), AllOf(HasSubstr("had failed before"), calls));
    EXPECT_THAT(message_of([&] { pending->wait(); }), calls);
    EXPECT_THAT(message_of([&] { send(tensor, (rank + 1) % 3, group); }), calls);
    barrier();
  });
}

TEST(Mismatch, OfSparseTensorsIsAlsoThatOfTheirShapes) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto group = new_group();
    at::Tensor tensor = at::ones({rank == 0 ? 4 : 6, rank == 0 ? 6 : 4}).to_sparse();
    EXPECT_THAT(message_of([&] { all_reduce(tensor, ReduceOp::SUM, group); }),
                AllOf(HasSubstr("rank 0: all_reduce(SUM, sparse Float [4, 6])"),
                      HasSubstr("rank 1: all_reduce(SUM, sparse Float [6, 4])")));
    barrier();
  });
}

TEST(Descriptors, OutOfThemIsThisRanksOwnErrorNotThePeersEnd) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto group = new_group();
    barrier();
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    const rlimit before = limit;
    if (rank == 1) {
      limit.rlim_cur = 3;
      ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    }
    barrier();
    // Rank 0's arena grows by a segment, whose descriptor rank 1 has no room for.
    at::Tensor tensor = rank == 0 ? empty_shared({80 << 20}, at::kByte).narrow(0, 0, 1 << 20).fill_(1)
                                  : at::zeros({1 << 20}, at::kByte);
    const auto text = message_of([&] { broadcast(tensor, 0, group); });
    if (rank == 1) {
      EXPECT_THAT(text, AllOf(HasSubstr("no file descriptor left"), HasSubstr("ulimit -n")));
      ::setrlimit(RLIMIT_NOFILE, &before);
    } else {
      EXPECT_THAT(text, HasSubstr("aborted by rank 1"));
    }
    barrier();  // both live, and so does the world
  });
}

TEST(Callback, CanNotDestroyTheGroupThatItBelongsTo) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto group = new_group();
    at::Tensor tensor = at::ones({100'000});
    const auto start = [&](bool message) {
      if (!message) return all_reduce(tensor, ReduceOp::SUM, group, /*async_op=*/true);
      return rank == 0 ? irecv(tensor, 1, group) : isend(tensor, 0, group);
    };
    for (const bool message : {false, true}) {
      if (rank == 1) {
        barrier();  // rank 0's operation has its callback before it can be done
        start(message)->wait();
        continue;
      }
      std::string refusal;
      const Work work = start(message);
      const auto done = work->getFuture()->then(
          [&](c10::ivalue::Future&) {
            refusal = message_of([&] { destroy_process_group(group); });
            return c10::IValue(1);
          },
          c10::IntType::get());
      barrier();
      done->wait();
      EXPECT_THAT(refusal, HasSubstr("in a callback of one of its own futures"));
    }
    barrier(group);  // nothing has happened to it
    destroy_process_group(group);
    barrier();
  });
}

}  // namespace
}  // namespace lockstep::after_error_test
