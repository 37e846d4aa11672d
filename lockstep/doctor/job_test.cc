#include <future>
#include <gmock/gmock.h>
#include <map>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/doctor/internal/exercise.h>
#include <lockstep/doctor/internal/known_values.h>
#include <lockstep/doctor/internal/report_board.h>
#include <lockstep/doctor/job.h>
#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/rendezvous.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::doctor::job_test {

using internal::difference_from_sum;
using internal::exercise_collectives;
using internal::fill_contribution;
using internal::ReportBoard;
using internal::TensorMemory;

namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Tournament, HasEachPairOnceAndNoRankTwiceInARound) {
  EXPECT_TRUE(tournament(1).empty());
  for (int size = 2; size <= 33; ++size) {
    std::set<Pair> seen;
    for (const auto& round : tournament(size)) {
      std::set<int> busy;
      for (const Pair& pair : round) {
        EXPECT_LT(pair.first, pair.second);
        EXPECT_TRUE(busy.insert(pair.first).second && busy.insert(pair.second).second) << size;
        EXPECT_TRUE(seen.insert(pair).second) << size;
      }
    }
    EXPECT_EQ(seen.size(), static_cast<size_t>(size * (size - 1) / 2));
    EXPECT_EQ(seen.begin()->first, 0);
    EXPECT_EQ(seen.rbegin()->second, size - 1);
  }
}

TEST(KnownValues, DifferencesAreNamed) {
  const at::Tensor tensor = at::empty({100}, at::kFloat);
  fill_contribution(tensor, 3);
  EXPECT_EQ(difference_from_sum(tensor, {3}), "");
  EXPECT_EQ(difference_from_sum(tensor, {11}), "");    // contributions repeat after eight ranks
  EXPECT_EQ(difference_from_sum(tensor, {0, 2}), "");  // 4 = 1 + 3
  EXPECT_THAT(difference_from_sum(tensor, {2}), HasSubstr("element 0 is 4 instead of 3 (100 of 100"));
  tensor[7] = -1;
  EXPECT_EQ(difference_from_sum(tensor, {3}), "element 7 is -1 instead of 32 (1 of 100 are wrong)");
}

/// Ranks as threads over one store.
std::vector<std::exception_ptr> run_threads(
    int size, const std::function<void(int, c10::intrusive_ptr<c10d::Store>)>& body) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<void>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::async(std::launch::async, [&, rank] { body(rank, store); }));
  }
  std::vector<std::exception_ptr> errors;
  for (auto& each : ranks) {
    try {
      each.get();
      errors.emplace_back();
    } catch (...) {
      errors.push_back(std::current_exception());
    }
  }
  return errors;
}

void expect_no_errors(const std::vector<std::exception_ptr>& errors) {
  for (const auto& error : errors) {
    if (error) {
      EXPECT_NO_THROW(std::rethrow_exception(error));
    }
  }
}

/// Of a process that is stopped.
class SilentStore final : public c10d::PrefixStore {
 public:
  explicit SilentStore(std::shared_future<void> end)
      : PrefixStore("", c10::make_intrusive<c10d::HashStore>()), end_(std::move(end)) {}
  using Store::set;
  void set(const std::string& /*key*/, const std::vector<uint8_t>& /*value*/) override { end_.wait(); }

 private:
  std::shared_future<void> end_;
};

TEST(ReportBoard, AStoreThatDoesNotAnswerIsAnError) {
  std::promise<void> end;
  ReportBoard board(c10::make_intrusive<SilentStore>(end.get_future()), 1, 2, 50ms);
  EXPECT_THAT(testing::message_of<c10::DistStoreError>([&] { board.gather("me", Deadline::after(60s)); }),
              HasSubstr("the job's store can't be reached: no answer"));
  end.set_value();
}

TEST(ReportBoard, GivesAllReportsToAll) {
  expect_no_errors(run_threads(5, [](int rank, auto store) {
    ReportBoard board(store, rank, 5);
    for (int round = 0; round < 3; ++round) {
      const auto reports = board.gather(std::to_string(rank * 10 + round), Deadline::after(30s));
      for (int peer = 0; peer < 5; ++peer) {
        EXPECT_EQ(reports[static_cast<size_t>(peer)], std::to_string(peer * 10 + round));
        EXPECT_EQ(board.state(peer), ReportBoard::State::kPresent);
      }
    }
    EXPECT_EQ(board.share("from " + std::to_string(rank), Deadline::after(30s)), "from 0");
  }));
}

TEST(ReportBoard, GoesOnWithoutSilentAndEndedRanks) {
  expect_no_errors(run_threads(4, [](int rank, auto store) {
    if (rank == 1 || rank == 2) return;
    ReportBoard board(store, rank, 4);
    board.set_watch([](int peer) { return peer == 2; });
    auto reports = board.gather("\xff not text", Deadline::after(300ms));
    EXPECT_TRUE(reports[0] && reports[3]);
    EXPECT_FALSE(reports[1] || reports[2]);
    EXPECT_EQ(board.state(1), ReportBoard::State::kSilent);
    EXPECT_EQ(board.state(2), ReportBoard::State::kEnded);
    reports = board.gather("again", Deadline::never());  // no rank is waited for any more
    EXPECT_EQ(reports[3], "again");
    EXPECT_EQ(board.state(1), ReportBoard::State::kSilent);
    EXPECT_EQ(board.state(2), ReportBoard::State::kEnded);
  }));
}

TEST(ReportBoard, WhoComesBackTooLateLearnsIt) {
  std::promise<void> over;
  auto may_come = over.get_future().share();
  const auto errors = run_threads(3, [&](int rank, auto store) {
    ReportBoard board(store, rank, 3);
    if (rank == 2) may_come.wait();
    board.gather("x", Deadline::after(300ms));
    if (rank == 0) over.set_value();
  });
  expect_no_errors({errors[0], errors[1]});
  EXPECT_THROW(std::rethrow_exception(errors[2]), DistTimeoutError);
}

TEST(ReportBoard, AMissingRank0IsNamed) {
  const auto errors = run_threads(2, [](int rank, auto store) {
    if (rank == 0) return;
    ReportBoard board(store, rank, 2);
    board.set_watch([](int) { return true; });
    board.gather("x", Deadline::after(30s));
  });
  try {
    std::rethrow_exception(errors[1]);
  } catch (const DistTimeoutError& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("rank 0, which collects the results, has ended"));
  }
}

/// Ranks whose pairs behave as a table says.
class FakeProbe : public JobProbe {
 public:
  struct Script {
    std::string join_error;                      // of rank 1
    std::string all_error;                       // of all ranks
    std::map<Pair, PairMeasurement> pairs;       // others are fast
    std::vector<std::string> hosts = {};         // by rank; none: all are on this one
    std::map<Pair, WireMeasurement> wires = {};  // as the lower rank sees them; others are fast
  };
  FakeProbe(int rank, Script script) : rank_(rank), script_(std::move(script)) {}
  void join() override {
    if (rank_ == 1 && !script_.join_error.empty()) throw std::runtime_error(script_.join_error);
  }
  void test_all() override {
    if (!script_.all_error.empty()) throw std::runtime_error(script_.all_error);
  }
  double clock_offset() override { return 0; }
  PairMeasurement test_pairs(const std::vector<Pair>& pairs) override {
    for (const Pair& pair : pairs) {
      if (pair.first != rank_ && pair.second != rank_) continue;
      ++tested[pair];
      if (script_.pairs.contains(pair)) return script_.pairs[pair];
      return {"", 2e-6, 100e-6};
    }
    return {};
  }

  std::string wire() override { return script_.hosts.empty() ? "" : "UCX 1.13.1 (tcp/lo)"; }
  WireMeasurement test_wires(const std::vector<Pair>& pairs) override {
    std::set<std::string> busy;
    for (const Pair& pair : pairs) {
      for (int rank : {pair.first, pair.second}) {
        EXPECT_TRUE(busy.insert(script_.hosts.at(static_cast<size_t>(rank))).second)
            << "two wires of a host at once";
      }
    }
    for (const Pair& pair : pairs) {
      if (pair.first != rank_ && pair.second != rank_) continue;
      ++tested_wires[pair];
      if (script_.wires.contains(pair) && pair.first == rank_) return script_.wires[pair];
      return {.rate = 1e9, .segments = 1000, .latency = 20e-6};
    }
    return {};
  }

  std::map<Pair, int> tested;
  std::map<Pair, int> tested_wires;

 private:
  int rank_;
  Script script_;
};

struct Outcome {
  std::string report;  // rank 0's
  std::vector<int> statuses;
};

Outcome examine_with(int size, const FakeProbe::Script& script, JobOptions options = {}) {
  Outcome outcome;
  outcome.statuses.resize(static_cast<size_t>(size), -1);
  expect_no_errors(run_threads(size, [&](int rank, auto store) {
    if (!script.hosts.empty()) pretend_host(script.hosts[static_cast<size_t>(rank)]);
    World world;
    world.rank = rank;
    world.world_size = size;
    world.store = store;
    FakeProbe probe(rank, script);
    std::ostringstream out;
    outcome.statuses[static_cast<size_t>(rank)] = examine_job(world, probe, options, out);
    if (rank == 0) {
      outcome.report = out.str();
    } else {
      EXPECT_EQ(out.str(), "");
    }
    for (const auto& [pair, times] : probe.tested) {
      EXPECT_EQ(times, script.pairs.contains(pair) && !script.pairs.at(pair).error.empty() ? 1 : 3);
    }
    for (const auto& [pair, times] : probe.tested_wires) {
      EXPECT_EQ(times, script.wires.contains(pair) && !script.wires.at(pair).error.empty() ? 1 : 3);
    }
    if (script.join_error.empty() && script.hosts.empty()) {
      EXPECT_EQ(probe.tested.size(), static_cast<size_t>(size - 1));
    }
    pretend_host("");
  }));
  return outcome;
}

TEST(ExamineJob, AHealthyJobPasses) {
  for (int size : {1, 2, 3, 4}) {
    const Outcome outcome = examine_with(size, {});
    EXPECT_THAT(outcome.statuses, ::testing::Each(0)) << outcome.report;
    EXPECT_THAT(outcome.report, HasSubstr("0 problems"));
  }
}

TEST(ExamineJob, NamesTheFailingPairOnAllRanksTheSameStatus) {
  const Outcome outcome = examine_with(4, {"", "", {{{1, 3}, {"the wire is cut", 0, 0}}}});
  EXPECT_THAT(outcome.statuses, ::testing::Each(1));
  EXPECT_THAT(outcome.report, HasSubstr("problem pairs        ranks 1 and 3: rank 1 says: the wire is cut"));
  EXPECT_THAT(outcome.report, HasSubstr("5 of 6 pairs work"));
}

TEST(ExamineJob, NamesTheSlowPair) {
  const FakeProbe::Script script{"", "", {{{0, 2}, {"", 2e-6, 50e-3}}}};
  Outcome outcome = examine_with(4, script);
  EXPECT_THAT(outcome.report,
              AllOf(HasSubstr("warning pairs        ranks 0 and 2: all_reduce of 1 MiB takes 50 ms"),
                    HasSubstr("5 of 6 pairs work")));
  EXPECT_THAT(outcome.statuses, ::testing::Each(0)) << outcome.report;
  outcome = examine_with(4, script, {.strict = true});
  EXPECT_THAT(outcome.statuses, ::testing::Each(1));
}

const std::vector<std::string> kThreeHosts = {"host-a", "host-a", "host-b", "host-c"};

TEST(ExamineJob, NamesTheSlowDirectionOfAWire) {
  const WireMeasurement slow{.rate = 2.5e6, .segments = 1000, .latency = 20e-6};
  const FakeProbe::Script script{"", "", {}, kThreeHosts, {{{0, 3}, slow}}};
  Outcome outcome = examine_with(4, script);
  EXPECT_THAT(outcome.statuses, ::testing::Each(0)) << outcome.report;
  EXPECT_THAT(
      outcome.report,
      AllOf(HasSubstr(
                "warning wires        host-a and host-c (ranks 0 and 3): 20 Mbit/s from host-a to host-c"),
            HasSubstr("2 of 3 wires between hosts work"), HasSubstr("host-a (ranks 0 and 1)")));
  outcome = examine_with(4, script, {.json = true});
  const auto wires = nlohmann::json::parse(outcome.report).at("wires");
  ASSERT_EQ(wires.size(), 3);
  for (const auto& wire : wires) {
    const bool is_slow = wire.at("ranks") == nlohmann::json({0, 3});
    EXPECT_EQ(wire.at("forth").at("bytes_per_second").at(2), is_slow ? 2.5e6 : 1e9);
    EXPECT_EQ(wire.at("back").at("segments"), 3000);
    EXPECT_EQ(wire.at("hosts").size(), 2);
  }
}

TEST(ExamineJob, NamesAWireThatDoesNotAnswerAndTriesNoPairOverItAgain) {
  const FakeProbe::Script script{"", "", {}, kThreeHosts, {{{0, 2}, {.error = "nothing came"}}}};
  const Outcome outcome = examine_with(4, script);
  EXPECT_THAT(outcome.statuses, ::testing::Each(1));
  EXPECT_THAT(
      outcome.report,
      AllOf(HasSubstr("problem wires        host-a and host-b (ranks 0 and 2): rank 0 says: nothing came"),
            HasSubstr("1 of 1 pairs work"), HasSubstr("3 of 3 pairs between hosts work")));
}

TEST(ExamineJob, TellsItsProgressOnRank0) {
  std::vector<std::string> steps;
  examine_with(2, {"", "", {}, {"host-a", "host-b"}},
               {.progress = [&](const std::string& step) { steps.push_back(step); }});
  EXPECT_THAT(steps, ::testing::Contains("init_process_group"));
  EXPECT_THAT(steps, ::testing::Contains("wires between hosts, round 1 of 3"));
  EXPECT_THAT(steps, ::testing::Contains("pairs of ranks, round 1 of 3"));
}

TEST(ExamineJob, FailureOfJoiningEndsItAndFailureOfAllDoesNot) {
  Outcome outcome = examine_with(3, {"no memory", "", {}});
  EXPECT_THAT(outcome.statuses, ::testing::Each(1));
  EXPECT_THAT(outcome.report, AllOf(HasSubstr("rank 1 says: no memory"), Not(HasSubstr("pairs work"))));
  outcome = examine_with(3, {"", "wrong values", {}});
  EXPECT_THAT(outcome.statuses, ::testing::Each(1));
  EXPECT_THAT(outcome.report, AllOf(HasSubstr("rank 0 says: wrong values (ranks 1 and 2 failed too)"),
                                    HasSubstr("3 of 3 pairs work")));
}

TEST(ExamineJob, JsonHasThePairs) {
  const Outcome outcome = examine_with(3, {"", "", {{{0, 2}, {"cut", 0, 0}}}}, {.json = true});
  const auto json = nlohmann::json::parse(outcome.report);
  EXPECT_EQ(json.at("status"), 1);
  EXPECT_EQ(json.at("pairs").size(), 3);
  for (const auto& pair : json.at("pairs")) {
    const bool broken = pair.at("ranks") == nlohmann::json({0, 2});
    EXPECT_EQ(pair.at("errors").size(), broken ? 2 : 0);
    EXPECT_EQ(pair.at("latency_seconds").size(), broken ? 0 : 3);
  }
}

TEST(ExamineJob, BadOptionsAndNoJobAreRefused) {
  std::ostringstream out;
  EXPECT_THROW(examine_job({.timeout = 999ms}, out), c10::ValueError);
}

/// Runs the real thing in processes and returns what rank 0 wrote; `arm` sets failpoints.
struct RealOutcome {
  std::string report;
  std::vector<testing::RankOutcome> ranks;
};

RealOutcome examine_processes(int size, const std::function<void(int rank)>& arm, int expected_status,
                              std::vector<int> expected_failures = {}, int hosts = 0) {
  RealOutcome result;
  result.ranks = testing::run_ranks_collect(size,
                                            [&](int rank) {
                                              arm(rank);
                                              JobOptions options;
                                              options.timeout = expected_failures.empty() ? 30s : 4s;
                                              EXPECT_EQ(examine_job(options, std::cout), expected_status);
                                            },
                                            {.expected_failures = expected_failures, .hosts = hosts});
  for (const auto& outcome : result.ranks) {
    const bool expected = std::count(expected_failures.begin(), expected_failures.end(), outcome.rank) > 0;
    if (!expected) {
      EXPECT_EQ(outcome.exit_status, 0) << outcome.exception.value_or("") << outcome.output;
    }
    if (outcome.rank == 0) result.report = outcome.output;
  }
  return result;
}

TEST(LockstepProbe, AHealthyJobPasses) {
  const auto outcome = examine_processes(
      3, [](int) {}, 0);
  EXPECT_THAT(outcome.report, AllOf(HasSubstr("over all 3 ranks gave the right values"),
                                    HasSubstr(" of 3 pairs work"), HasSubstr("\n0 problems")));
}

TEST(LockstepProbe, AFailingPairIsNamed) {
  const auto outcome = examine_processes(
      3, [](int) { failpoint::configure("doctor_pair_1_2=error(the wire is cut)"); }, 1);
  EXPECT_THAT(outcome.report,
              AllOf(HasSubstr("ranks 1 and 2: rank 1 says: failpoint doctor_pair_1_2: the wire is cut"),
                    HasSubstr(" of 3 pairs work"), HasSubstr("\n1 problem,")));
}

TEST(LockstepProbe, ASlowPairIsNamed) {
  const auto outcome = examine_processes(
      3, [](int) { failpoint::configure("doctor_pair_0_2=delay(5)"); }, 0);
  EXPECT_THAT(outcome.report, HasSubstr("warning pairs        ranks 0 and 2: all_reduce of "));
}

TEST(LockstepProbe, OverHostsAllWiresAreTested) {
  if (!testing::has_wire()) GTEST_SKIP() << "needs UCX";
  const auto outcome = examine_processes(
      3, [](int) {}, 0, {}, /*hosts=*/3);
  EXPECT_THAT(outcome.report,
              AllOf(HasSubstr("over all 3 ranks gave the right values"), HasSubstr("wires        "),
                    HasSubstr(" pairs between hosts work"), HasSubstr("\n0 problems")));
}

TEST(LockstepProbe, AWireThatFailsIsNamed) {
  if (!testing::has_wire()) GTEST_SKIP() << "needs UCX";
  const auto outcome = examine_processes(
      3, [](int) { failpoint::configure("doctor_wire_0_2=error(the wire is cut)"); }, 1, {}, /*hosts=*/3);
  EXPECT_THAT(outcome.report,
              AllOf(HasSubstr("(ranks 0 and 2): rank 0 says: failpoint doctor_wire_0_2: the wire is cut"),
                    HasSubstr("\n1 problem,")));
}

TEST(LockstepProbe, ALateWireIsNamed) {
  if (!testing::has_wire()) GTEST_SKIP() << "needs UCX";
  const auto outcome = examine_processes(
      3, [](int) { failpoint::configure("doctor_wire_1_2=delay(20)"); }, 0, {}, /*hosts=*/3);
  // On a busy machine it is also slow by what it transfers, which comes first then.
  EXPECT_THAT(outcome.report,
              ContainsRegex("\\(ranks 1 and 2\\): [^\n]*a message takes [^\n]* times the median"));
}

TEST(LockstepProbe, ARankThatHangsInAPairIsNamedWithinTheTimeout) {
  const auto outcome = examine_processes(3,
                                         [](int rank) {
                                           if (rank == 2)
                                             failpoint::configure("doctor_pair_0_2=delay(9000)@1");
                                         },
                                         1, {2});
  EXPECT_THAT(outcome.report, AllOf(HasSubstr("rank 2 (pid " + std::to_string(outcome.ranks[2].pid)),
                                    HasSubstr("did not answer within 4 s during the test of the pairs 0-2"),
                                    HasSubstr("problem pairs        ranks 0 and 2")));
  // When it comes back at last, it learns that no rank waits for it.
  EXPECT_THAT(outcome.ranks[2].exception.value_or(""), HasSubstr("rank 2 did not answer in time"));
}

TEST(LockstepProbe, ARankThatDiesInAPairIsNamed) {
  const auto outcome = examine_processes(3,
                                         [](int rank) {
                                           if (rank == 1) failpoint::configure("doctor_pair_0_1=kill(9)");
                                         },
                                         1, {1});
  EXPECT_THAT(outcome.report, AllOf(HasSubstr("rank 1 (pid " + std::to_string(outcome.ranks[1].pid)),
                                    HasSubstr("ended during the test of the pairs 0-1"),
                                    HasSubstr("ranks 0 and 1: rank 0 says: ")));
}

TEST(LockstepProbe, ARankThatFailsInAllIsNamed) {
  const auto outcome = examine_processes(3,
                                         [](int rank) {
                                           if (rank == 1) failpoint::configure("doctor_all=kill(9)");
                                         },
                                         1, {1});
  EXPECT_THAT(outcome.report,
              AllOf(HasSubstr("rank 1 (pid "), HasSubstr("ended during operations over all ranks"),
                    HasSubstr("problem all ranks")));
}

TEST(Exercise, WrongValuesAreErrors) {
  // The ranks do not agree on their numbers, so that the sums come out as other ranks' would.
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    EXPECT_NO_THROW(exercise_collectives(100, TensorMemory::kStaged, {0, 1}, rank, {0, 1}, {}));
    try {
      exercise_collectives(100, TensorMemory::kStaged, {0, 2}, rank, {0}, {});
      ADD_FAILURE() << "should have thrown";
    } catch (const c10::DistBackendError& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  HasSubstr("all_reduce of 100 float32 gave wrong values: element 0 is 3 instead of 4"));
    }
  });
}

}  // namespace
}  // namespace lockstep::doctor::job_test
