#include <algorithm>
#include <cstdint>
#include <gmock/gmock.h>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/profiler/profiler.h>
#include <lockstep/profiler/testing/expect_shares.h>
#include <lockstep/profiler/testing/synthetic_trace.h>
#include <lockstep/profiler/trace_analysis.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::profiler::trace_analysis_test {
namespace {

using lockstep::testing::message_of;
using lockstep::testing::TemporaryFolder;
using nlohmann::json;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using testing::expect_shares;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::SyntheticTrace;

constexpr int64_t kMs = 1'000'000;

/// How a step is made, in milliseconds.
struct Plan {
  int64_t data = 10;
  int64_t forward = 20;
  int64_t backward = 40;
  int64_t optimizer = 15;
  int64_t idle = 5;
};

/// Two ranks of equal steps, each: data, forward, backward with a reduction beside its second half that goes on after it,
/// optimizer, nothing. A slower forward of a rank lets the others wait. `apart`: how many steps later than the rank before
/// it each rank has begun to record.
void write_run(const TemporaryFolder& folder, const std::string& below, const Plan& plan, int64_t slower = 0,
               int64_t ranks = 2, int64_t steps = 3, int64_t apart = 0) {
  for (int64_t rank = 0; rank < ranks; ++rank) {
    SyntheticTrace trace({.rank = rank, .world_size = ranks});
    int64_t at = 0;
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t begin = at;
      const auto pass = [&](int64_t ms) { return std::exchange(at, at + ms * kMs); };
      const int64_t data = pass(plan.data);
      trace.add("user_annotation", "enumerate(DataLoader)#lockstep::data::DataLoader.next", data, at);
      const int64_t forward = pass(plan.forward + (rank == 1 ? slower : 0));
      trace.add("user_annotation", "DistributedDataParallel.forward", forward, at);
      trace.add_operator("aten::linear", forward, at);
      trace.add_operator("aten::mm", forward + kMs, at);
      const int64_t backward = pass(plan.backward);
      trace.add_operator("autograd::engine::evaluate_function: MmBackward0", backward, at);
      trace.add_operator("aten::mm", backward, at);
      // All have begun it when the slower rank has; it ends 10 ms after that one's backward.
      const int64_t end = at + (rank == 1 ? 0 : slower * kMs) + 10 * kMs;
      trace.add_collective("all_reduce", step + 1 + rank * apart, backward + plan.backward * kMs / 2, end);
      at = end;
      const int64_t optimizer = pass(plan.optimizer);
      trace.add_operator("aten::add_", optimizer, at);
      pass(plan.idle);
      trace.add_step(step, begin, at);
    }
    trace.write(folder, below);
  }
}

TEST(TraceAnalysis, SharesAreThoseOfTheTrace) {
  const TemporaryFolder folder;
  write_run(folder, "", {});
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  ASSERT_EQ(analysis.ranks.size(), 2);
  EXPECT_EQ(analysis.ranks[0].steps, 3);
  expect_shares(analysis.mean, {.data = 10,
                                .forward = 20,
                                .backward = 40,
                                .communication = 10,
                                .optimizer = 15,
                                .idle = 5,
                                .hidden_communication = 20,
                                .waiting = 0});
  EXPECT_FALSE(analysis.slowest);
  EXPECT_THAT(analysis.notes, IsEmpty());
  EXPECT_THAT(analysis.advice, Contains(HasSubstr("communication is not hidden")));
  EXPECT_THAT(analysis.advice, Contains(HasSubstr("waits for data")));
}

TEST(TraceAnalysis, OperatorsAreSortedByTheirOwnTime) {
  const TemporaryFolder folder;
  write_run(folder, "", {});
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  ASSERT_FALSE(analysis.operators.empty());
  EXPECT_EQ(analysis.operators[0].name, "aten::mm");
  EXPECT_NEAR(analysis.operators[0].self_ms, 59, 0.01);
  EXPECT_NEAR(analysis.operators[0].calls, 2, 0.01);
  EXPECT_NEAR(analysis.operators[0].share, 59.0 / 75, 0.01);
  for (const OperatorTime& one : analysis.operators) {
    if (one.name == "aten::linear") {
      EXPECT_NEAR(one.self_ms, 1, 0.01) << "without what it calls";
    }
  }
}

TEST(TraceAnalysis, NamesTheRankForWhichOthersWait) {
  const TemporaryFolder folder;
  write_run(folder, "", {}, /*slower=*/30);
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  EXPECT_NEAR(analysis.ranks[0].mean.total(), 130, 0.01);
  // Rank 0 begins the reduction half of backward before its end, and computes until then.
  EXPECT_NEAR(analysis.ranks[0].mean.waiting, 10, 2);
  EXPECT_NEAR(analysis.ranks[1].mean.waiting, 0, 2);
  EXPECT_EQ(analysis.slowest, 1);
  EXPECT_THAT(analysis.why, HasSubstr("forward (50.0 ms and 20.0 ms)"));
  EXPECT_THAT(describe(analysis), HasSubstr("Slowest is rank 1"));
}

/// As on a host whose processor is busy: it gets what all have brought later than the others.
TEST(TraceAnalysis, ARankThatMovesBytesLongerIsSlowInThat) {
  const TemporaryFolder folder;
  for (int64_t rank = 0; rank < 3; ++rank) {
    SyntheticTrace trace({.rank = rank, .world_size = 3});
    trace.add_step(1, 0, 100 * kMs);
    trace.add("user_annotation", "forward", 0, 20 * kMs);
    trace.add_collective("all_reduce", 1, 20 * kMs, (rank == 2 ? 90 : 30) * kMs);
    trace.add_collective("all_reduce", 2, (rank == 2 ? 90 : 30) * kMs, 100 * kMs);
    trace.write(folder);
  }
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  EXPECT_EQ(analysis.slowest, 2);
  EXPECT_THAT(analysis.why, HasSubstr("; most of it in exposed communication (80.0 ms and 20.0 ms)"));
}

/// As a signal may find them.
TEST(TraceAnalysis, StepsThatNotAllRanksHaveRecordedDoNotCount) {
  const TemporaryFolder folder;
  write_run(folder, "some/", {}, /*slower=*/30, /*ranks=*/2, /*steps=*/3, /*apart=*/1);
  const TraceAnalysis some = analyze_traces(folder.path("some"));
  EXPECT_EQ(some.ranks[0].steps, 2);
  EXPECT_EQ(some.ranks[1].steps, 2);
  EXPECT_THAT(some.notes, ElementsAre(HasSubstr("2 steps are left out")));
  write_run(folder, "none/", {}, /*slower=*/30, /*ranks=*/2, /*steps=*/1, /*apart=*/1);
  const TraceAnalysis none = analyze_traces(folder.path("none"));
  EXPECT_EQ(none.ranks[0].steps, 1);
  EXPECT_THAT(none.notes, ElementsAre(HasSubstr("different steps")));
  EXPECT_EQ(none.slowest, 1);
  EXPECT_THAT(none.why, HasSubstr("without communication"));
  EXPECT_FALSE(none.waiting_is_known);
  EXPECT_THAT(describe(none), HasSubstr("is waiting for other ranks is not known"));
  EXPECT_THAT(to_json(none), HasSubstr("\"waiting\": null"));
  EXPECT_THAT(none.advice, Contains(HasSubstr("ranks wait for rank 1, or communication is not hidden")));
}

/// As with NCCL, whose last operations have not ended when the recording does.
TEST(TraceAnalysis, AStepOfWhichARankHasLostCollectivesCounts) {
  const TemporaryFolder folder;
  for (int64_t rank = 0; rank < 2; ++rank) {
    SyntheticTrace trace({.rank = rank, .world_size = 2});
    for (int64_t step = 0; step < 2; ++step) {
      const int64_t begin = step * 100 * kMs;
      trace.add_operator("aten::mm", begin, begin + 50 * kMs);
      for (int64_t i = 0; i < 3; ++i) {
        if (rank == 1 && step == 1 && i > 0) continue;
        trace.add_collective("all_reduce", 3 * step + i + 1, begin + (50 + 10 * i) * kMs,
                             begin + (60 + 10 * i) * kMs);
      }
      trace.add_step(step, begin, begin + 100 * kMs);
    }
    trace.write(folder, "");
  }
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  EXPECT_EQ(analysis.ranks[0].steps, 2);
  EXPECT_EQ(analysis.ranks[1].steps, 2);
  EXPECT_THAT(analysis.notes, IsEmpty());
}

TEST(TraceAnalysis, ComparesTwoRuns) {
  const TemporaryFolder folder;
  write_run(folder, "before/", {});
  write_run(folder, "after/", {.data = 0});
  const TraceAnalysis before = analyze_traces(folder.path("before"));
  const TraceAnalysis after = analyze_traces(folder.path("after"));
  EXPECT_THAT(describe_difference(before, after),
              HasSubstr("A step takes 90.00 ms, before 100.00 ms (-10.00 %)"));
  const json difference = json::parse(difference_to_json(before, after));
  EXPECT_NEAR(difference["change"]["phases"]["data"], -10, 0.01);
  EXPECT_NEAR(difference["change"]["step_ms"], -10, 0.01);
  EXPECT_NEAR(difference["before"]["phases"]["data"], 10, 0.01);
}

TEST(TraceAnalysis, AComparisonHasMemoryWaitingAndTheSlowestRank) {
  const TemporaryFolder folder;
  write_run(folder, "before/", {}, /*slower=*/30);
  write_run(folder, "after/", {});
  // Each rank has another peak in a cycle more: of 2 and 4 MiB, then of 1 and 2.
  for (const auto& [below, unit] : {std::pair("before/", 2 << 20), std::pair("after/", 1 << 20)}) {
    for (int64_t rank = 0; rank < 2; ++rank) {
      SyntheticTrace trace({.rank = rank, .held = {{"CPU", {{"parameters", 8 << 20}}}}});
      trace.add_memory(10 * kMs, (rank + 1) * unit, 0x10);
      trace.add_step(9, 10 * kMs, 10 * kMs + 1);
      trace.write(folder, below, /*cycle=*/2);
    }
  }
  const TraceAnalysis before = analyze_traces(folder.path("before"));
  const TraceAnalysis after = analyze_traces(folder.path("after"));
  const json change = json::parse(difference_to_json(before, after))["change"];
  EXPECT_NEAR(change["phases"]["waiting"], after.mean.waiting - before.mean.waiting, 0.001);
  EXPECT_LT(change["phases"]["waiting"].get<double>(), 0);
  EXPECT_NEAR(change["phases"]["hidden_communication"],
              after.mean.hidden_communication - before.mean.hidden_communication, 0.001);
  EXPECT_EQ(change["slowest"], (json{{"before", 1}, {"after", nullptr}}));
  ASSERT_EQ(change["memory"].size(), 1);
  EXPECT_EQ(change["memory"][0]["device"], "CPU");
  EXPECT_EQ(change["memory"][0]["bytes"], (json{{"before", 4 << 20}, {"after", 2 << 20}}));
  EXPECT_EQ(change["memory"][0]["held"], (json{{"before", 8 << 20}, {"after", 8 << 20}}));
  const std::string text = describe_difference(before, after);
  EXPECT_THAT(text, ContainsRegex("waiting, of the exposed +[0-9.]+ +0.00 +-[0-9.]+\n"));
  EXPECT_THAT(text, ContainsRegex("communication, hidden +[0-9.]+ +[0-9.]+ +[-+][0-9.]+\n"));
  EXPECT_THAT(text, ContainsRegex("CPU +4.00 +2.00 +-2.00\n"));
  EXPECT_THAT(text, ContainsRegex("CPU, from before +8.00 +8.00 +\\+0.00\n"));
  EXPECT_THAT(text, HasSubstr("Slowest was rank 1: "));
  EXPECT_THAT(text, HasSubstr("No rank is slowest now."));
}

TEST(TraceAnalysis, AComparisonTellsNoWaitingThatIsNotKnown) {
  const TemporaryFolder folder;
  write_run(folder, "before/", {});
  write_run(folder, "after/", {}, /*slower=*/0, /*ranks=*/2, /*steps=*/1, /*apart=*/1);
  const TraceAnalysis before = analyze_traces(folder.path("before"));
  const TraceAnalysis after = analyze_traces(folder.path("after"));
  ASSERT_FALSE(after.waiting_is_known);
  const json change = json::parse(difference_to_json(before, after))["change"];
  EXPECT_TRUE(change["phases"]["waiting"].is_null());
  EXPECT_THAT(change["memory"], IsEmpty());
  EXPECT_THAT(describe_difference(before, after), Not(HasSubstr("waiting, of")));
}

/// One that takes little is there as well, and what is wrong with the traces of either.
TEST(TraceAnalysis, AComparisonHasAllOperatorsAndNotes) {
  const TemporaryFolder folder;
  const auto write = [&](const std::string& below, int64_t most, int64_t ranks) {
    SyntheticTrace trace({.rank = 0, .world_size = ranks});
    int64_t at = 0;
    for (int i = 0; i < 30; ++i) {
      const int64_t begin = std::exchange(at, at + (i + 1) * kMs);
      trace.add_operator("aten::number" + std::to_string(i), begin, at);
    }
    const int64_t begin = std::exchange(at, at + most * kMs);
    trace.add_operator("aten::other", begin, at);
    trace.add_step(1, 0, at);
    trace.write(folder, below);
  };
  write("before/", 100, 1);
  write("after/", 2, 2);
  const std::string text =
      describe_difference(analyze_traces(folder.path("before")), analyze_traces(folder.path("after")));
  EXPECT_THAT(text, ContainsRegex("aten::other +100.000 +2.000 +-98.00"));
  EXPECT_THAT(text, ContainsRegex("aten::number1 +2.000 +2.000 +\\+0.00"));
  EXPECT_THAT(text, HasSubstr("Note: traces of 1 of 2 ranks are here"));
}

TEST(TraceAnalysis, TellsWhatIsMissing) {
  const TemporaryFolder folder;
  SyntheticTrace trace({.rank = 0, .world_size = 4});
  trace.add_operator("aten::mm", 0, kMs);
  trace.write(folder);
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  EXPECT_THAT(analysis.notes, Contains(HasSubstr("no marks of steps")));
  EXPECT_THAT(analysis.notes, Contains(HasSubstr("1 of 4 ranks")));
  EXPECT_THAT(message_of<c10::ValueError>([&] { analyze_traces(folder.path("none")); }),
              HasSubstr("can't be read"));
}

TEST(TraceAnalysis, TracesOfSeveralRunsAreNoted) {
  const TemporaryFolder folder;
  const auto write = [&](int64_t pid, int cycle) {
    SyntheticTrace trace({.rank = 0, .world_size = 1, .pid = pid});
    trace.add_operator("aten::mm", 0, kMs);
    trace.write(folder, "", cycle);
  };
  write(1000, 1);
  write(1000, 2);
  EXPECT_THAT(analyze_traces(folder.path().string()).notes, Not(Contains(HasSubstr("processes"))));
  write(2000, 3);
  EXPECT_THAT(analyze_traces(folder.path().string()).notes,
              Contains(HasSubstr("rank 0 has traces of 2 processes")));
}

TEST(TraceAnalysis, TracesWithoutARankGetThatOfTheirOperationsOrProcess) {
  const TemporaryFolder folder;
  for (const int cycle : {1, 2}) {
    SyntheticTrace trace({.rank = 5, .tells_rank = false});
    trace.add_operator("aten::mm", 0, kMs);
    if (cycle == 1) trace.add_collective("barrier", 1, kMs, 2 * kMs);
    trace.write(folder, "", cycle);
  }
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  ASSERT_EQ(analysis.ranks.size(), 1);
  EXPECT_EQ(analysis.ranks[0].rank, 5);
  EXPECT_EQ(analysis.ranks[0].steps, 2) << "of both traces";
}

/// Which tell of no process in their header, and of no rank without a process group.
TEST(TraceAnalysis, CyclesOfPythonsProfilerAreOfOneRank) {
  const TemporaryFolder folder;
  for (const int cycle : {1, 2}) {
    SyntheticTrace trace({.tells_rank = false, .tells_process = false});
    trace.add_operator("aten::mm", 0, kMs);
    trace.write(folder, "", cycle);
  }
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  ASSERT_EQ(analysis.ranks.size(), 1);
  EXPECT_EQ(analysis.ranks[0].steps, 2) << "of both traces";
}

/// As older Kineto's are.
TEST(TraceAnalysis, TimesMayCountFrom1970) {
  const TemporaryFolder folder;
  SyntheticTrace trace({.world_size = 1, .tells_base = false});
  trace.add_operator("aten::mm", 0, 3 * kMs);
  trace.add_operator("aten::add", 3 * kMs, 4 * kMs);
  trace.add_step(1, 0, 5 * kMs);
  trace.write(folder);
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  EXPECT_NEAR(analysis.mean.total(), 5, 0.01);
  EXPECT_NEAR(analysis.mean.idle, 1, 0.01);
}

TEST(TraceAnalysis, JsonHasWhatTheTextHas) {
  const TemporaryFolder folder;
  write_run(folder, "", {}, /*slower=*/30);
  const json report = json::parse(to_json(analyze_traces(folder.path().string())));
  EXPECT_EQ(report["slowest"]["rank"], 1);
  EXPECT_EQ(report["ranks"].size(), 2);
  EXPECT_NEAR(report["ranks"][1]["phases"]["forward"], 50, 0.01);
  EXPECT_EQ(report["operators"][0]["name"], "aten::mm");
  EXPECT_FALSE(report["advice"].empty());
}

}  // namespace
}  // namespace lockstep::profiler::trace_analysis_test
