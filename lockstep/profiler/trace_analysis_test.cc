#include <algorithm>
#include <cstdint>
#include <gmock/gmock.h>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <lockstep/base/training/held_tensors.h>
#include <lockstep/profiler/profiler.h>
#include <lockstep/profiler/record_function.h>
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

/// Each within 2 % of itself, or of the step where there is nothing of it.
void expect_shares(const TracePhaseTimes& times, const TracePhaseTimes& expected) {
  const auto expect = [&](const char* name, double TracePhaseTimes::*part) {
    const double share = expected.*part;
    EXPECT_NEAR(times.*part, share, 0.02 * (share > 0 ? share : expected.total())) << name;
  };
  EXPECT_NEAR(times.total(), expected.total(), 0.001);
  expect("data", &TracePhaseTimes::data);
  expect("forward", &TracePhaseTimes::forward);
  expect("backward", &TracePhaseTimes::backward);
  expect("communication", &TracePhaseTimes::communication);
  expect("optimizer", &TracePhaseTimes::optimizer);
  expect("idle", &TracePhaseTimes::idle);
  expect("hidden communication", &TracePhaseTimes::hidden_communication);
  expect("waiting", &TracePhaseTimes::waiting);
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

/// Milliseconds of a trace, each of which something takes or does not.
struct Milliseconds {
  static constexpr int64_t kAll = 160;
  void take(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) taken.at(static_cast<size_t>(i)) = true;
  }
  bool operator[](int64_t i) const { return taken.at(static_cast<size_t>(i)); }
  std::vector<bool> taken = std::vector<bool>(kAll, false);
};

/// Steps at random, with gaps between them: all kinds of events, some of which a step's end cuts, or that are beside or within
/// others, and some that are to have no effect. What a step is made of is known millisecond by millisecond.
class RandomRank {
 public:
  /// `gpu`: kernels compute, and not operators.
  RandomRank(int64_t rank, bool gpu, std::mt19937_64& random)
      : trace({.rank = rank, .world_size = 2}), random_(random) {
    for (int64_t at = below(5); at < kLast; at += below(5)) {
      const int64_t begin = std::exchange(at, at + 10 + below(40));
      steps_.emplace_back(begin, at);
      trace.add_step(static_cast<int64_t>(steps_.size()), begin * kMs, at * kMs);
    }
    add_spans(2, {&data_}, "user_annotation", "data");
    add_spans(4, {&forward_}, "user_annotation", "DistributedDataParallel.forward");
    add_spans(2, {&backward_}, "user_annotation", "backward");
    add_spans(3, {&optimizer_}, "user_annotation", "Optimizer.step#SGD");
    // Backward functions and operators of any thread, as autograd has its own.
    const std::vector<Milliseconds*> of_operators =
        gpu ? std::vector{&operators_} : std::vector{&operators_, &computing_};
    for (const int64_t thread : {kThread, kOtherThread}) {
      add_spans(8, of_operators, "cpu_op", "aten::mm", thread);
      auto of_functions = of_operators;
      of_functions.push_back(&backward_);
      add_spans(3, of_functions, "cpu_op", "autograd::engine::evaluate_function: MmBackward0", thread);
    }
    if (gpu) {
      add_span({&computing_}, "kernel", "gemm", kStream);
      for (const char* category : {"kernel", "gpu_memcpy", "gpu_memset"}) {
        add_spans(4, {&computing_}, category, "gemm", kStream);
      }
      add_spans(3, {}, "kernel", "ncclDevKernel_AllReduce", kStream);  // our operations tell of it
    }
    add_spans(3, {}, "cpu_op", "c10d::allreduce_");
    add_spans(3, {}, "user_annotation", "forward", kOtherThread);  // of a loader, say
    add_spans(3, {}, "user_annotation", "something");
  }

  /// Its part of a collective that the last rank has begun at `last`.
  void add_collective(const std::string& group, int64_t sequence, int64_t begin, int64_t last, int64_t end) {
    trace.add_collective("all_reduce", sequence, begin * kMs, end * kMs, /*root=*/-1, group);
    communication_.take(begin, end);
    waiting_.take(begin, last);
  }

  TracePhaseTimes mean() const {
    TracePhaseTimes mean;
    for (const auto& [begin, end] : steps_) {
      int64_t turn = begin;  // the end of its last backward function
      for (int64_t i = begin; i < end; ++i) {
        if (backward_[i]) turn = i + 1;
      }
      if (turn == begin) turn = end;
      for (int64_t i = begin; i < end; ++i) phase_of(i, turn, mean) += 1;
      for (int64_t i = begin; i < end; ++i) mean.hidden_communication += communication_[i] && computing_[i];
      for (int64_t i = begin; i < end; ++i) mean.waiting += waiting_[i] && !computing_[i] && !data_[i];
    }
    for (double TracePhaseTimes::*part :
         {&TracePhaseTimes::data, &TracePhaseTimes::forward, &TracePhaseTimes::backward,
          &TracePhaseTimes::communication, &TracePhaseTimes::optimizer, &TracePhaseTimes::idle,
          &TracePhaseTimes::hidden_communication, &TracePhaseTimes::waiting}) {
      mean.*part /= static_cast<double>(steps_.size());
    }
    return mean;
  }

  static constexpr int64_t kLast = 100;  // steps end by half a hundred later, and all else by a few
  SyntheticTrace trace;

 private:
  static constexpr int64_t kThread = SyntheticTrace::kThread, kOtherThread = kThread + 1, kStream = 7;

  int64_t below(int64_t most) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(most)); }
  void add_span(const std::vector<Milliseconds*>& what, const std::string& category, const std::string& name,
                int64_t thread) {
    const int64_t begin = below(kLast + 40), end = begin + 1 + below(12);
    trace.add(category, name, begin * kMs, end * kMs, thread);
    for (Milliseconds* each : what) each->take(begin, end);
  }
  void add_spans(int64_t most, const std::vector<Milliseconds*>& what, const std::string& category,
                 const std::string& name, int64_t thread = kThread) {
    for (int64_t many = below(most + 1); many > 0; --many) add_span(what, category, name, thread);
  }

  /// As TracePhaseTimes says.
  double& phase_of(int64_t i, int64_t turn, TracePhaseTimes& times) const {
    if (data_[i]) return times.data;
    if (communication_[i] && !computing_[i]) return times.communication;
    if (backward_[i]) return times.backward;
    if (optimizer_[i]) return times.optimizer;
    if (forward_[i]) return times.forward;
    if (operators_[i]) return i < turn ? times.forward : times.optimizer;
    return times.idle;
  }

  std::mt19937_64& random_;
  std::vector<std::pair<int64_t, int64_t>> steps_;
  Milliseconds data_, forward_, backward_, optimizer_, operators_, computing_, communication_, waiting_;
};

/// Two ranks, two groups, with and without a GPU.
TEST(TraceAnalysis, SharesOfRandomStepsAreThoseOfTheTrace) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto below = [&](int64_t most) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(most));
    };
    const bool gpu = seed % 2 == 1;
    RandomRank ranks[] = {RandomRank(0, gpu, random), RandomRank(1, gpu, random)};
    for (const char* group : {"world", "other"}) {
      int64_t at = below(30);
      for (int64_t sequence = 1; sequence == 1 || at < RandomRank::kLast + 20; ++sequence) {
        const int64_t begins[] = {at + below(8), at + below(8)};
        const int64_t last = std::max(begins[0], begins[1]), end = last + 1 + below(10);
        for (const int rank : {0, 1}) ranks[rank].add_collective(group, sequence, begins[rank], last, end);
        at = end + below(20);
      }
    }
    const TemporaryFolder folder;
    for (const RandomRank& rank : ranks) rank.trace.write(folder);
    const TraceAnalysis analysis = analyze_traces(folder.path().string());
    ASSERT_EQ(analysis.ranks.size(), 2);
    for (const int rank : {0, 1}) expect_shares(analysis.ranks[rank].mean, ranks[rank].mean());
    EXPECT_THAT(describe(analysis), HasSubstr("A step takes"));
  }
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
  EXPECT_THAT(text, HasSubstr("Note: traces of 1 ranks of 2 are here"));
}

/// Two steps of one block for each use; in the second, with the state that the first has left, is the peak.
TEST(TraceAnalysis, MemoryPeaksTellWhatItsBlocksAreFor) {
  const TemporaryFolder folder;
  SyntheticTrace trace({.rank = 0, .world_size = 1});
  const auto add = [&](int64_t at, int64_t mebibytes, int64_t address) {
    trace.add_memory(at, mebibytes * (1 << 20), address);
  };
  for (int64_t step = 0; step < 2; ++step) {
    const int64_t begin = step * 100 * kMs;
    const auto at = [&](int64_t ms) { return begin + ms * kMs; };
    trace.add_step(step, begin, at(100));
    trace.add("user_annotation", "data", begin, at(10));
    trace.add("user_annotation", "forward", at(10), at(40));
    trace.add_operator("autograd::engine::evaluate_function: MmBackward0", at(40), at(70));
    trace.add("user_annotation", "optimizer", at(70), at(90));
    add(at(5), 1, 0x10);
    add(at(11), 2, 0x20);   // an activation
    add(at(12), 64, 0x30);  // is gone at the peak
    add(at(13), -64, 0x30);
    add(at(14), -7, 0x99);                  // from before the recording
    add(at(41), 4, 0x40);                   // a gradient
    add(at(42), 8, 0x50);                   // of backward alone
    if (step == 1) add(at(43), 128, 0x60);  // the peak
    if (step == 1) add(at(44), -128, 0x60);
    add(at(50), -2, 0x20);
    add(at(51), -8, 0x50);
    if (step == 0) add(at(71), 16, 0x70);  // the optimizer's state
    add(at(72), 32, 0x80);                 // of the optimizer alone
    add(at(73), -32, 0x80);
    add(at(95), -4, 0x40);
    add(at(96), -1, 0x10);
    if (step == 1) add(at(97), -16, 0x70);
  }
  trace.write(folder);
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  ASSERT_EQ(analysis.ranks.at(0).memory.size(), 1);
  const MemoryPeak& peak = analysis.ranks[0].memory[0];
  EXPECT_EQ(peak.device, "CPU");
  EXPECT_EQ(peak.inputs, 1 << 20);
  EXPECT_EQ(peak.activations, 2 << 20);
  EXPECT_EQ(peak.gradients, 4 << 20);
  EXPECT_EQ(peak.optimizer_state, 16 << 20);
  EXPECT_EQ(peak.temporary, (8 + 128) << 20);
  EXPECT_EQ(peak.other, 0);
  EXPECT_EQ(peak.bytes, (1 + 2 + 4 + 16 + 8 + 128) << 20);
  EXPECT_THAT(describe(analysis),
              HasSubstr("159.0 MiB (inputs 1.0 MiB, activations 2.0 MiB, gradients 4.0 MiB, "
                        "optimizer state 16.0 MiB, temporary 136.0 MiB, other 0.0 MiB)"));
  const json told = json::parse(to_json(analysis))["ranks"][0]["memory"][0];
  EXPECT_EQ(told["optimizer_state"], 16 << 20);
  EXPECT_EQ(told["temporary"], (8 + 128) << 20);
}

/// What the host does beside it hides nothing, and kernels that communicate do not compute.
TEST(TraceAnalysis, CommunicationOfAGpuIsExposedWhereNoKernelRunsBesideIt) {
  const TemporaryFolder folder;
  SyntheticTrace trace({.world_size = 1});
  trace.add_step(1, 0, 100 * kMs);
  trace.add("user_annotation", "forward", 0, 20 * kMs);
  trace.add_operator("autograd::engine::evaluate_function: MmBackward0", 20 * kMs, 30 * kMs);
  trace.add_kernel("kernel", "gemm", 5 * kMs, 60 * kMs);
  trace.add_kernel("gpu_memcpy", "Memcpy DtoD", 60 * kMs, 65 * kMs);
  trace.add_kernel("gpu_memset", "Memset", 65 * kMs, 67 * kMs, /*device=*/1);
  trace.add_kernel("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 52 * kMs, 90 * kMs);
  trace.add_collective("all_reduce", 1, 50 * kMs, 90 * kMs);
  trace.add_operator("aten::item", 70 * kMs, 80 * kMs);
  trace.add_operator("aten::add_", 92 * kMs, 97 * kMs);
  trace.write(folder);
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  expect_shares(analysis.mean, {.data = 0,
                                .forward = 20,
                                .backward = 10,
                                .communication = 90 - 67,
                                .optimizer = 5,
                                .idle = (67 - 30) + 2 + 3,
                                .hidden_communication = 67 - 50,
                                .waiting = 0});
  std::vector<std::string> operators;
  for (const OperatorTime& one : analysis.operators) operators.push_back(one.name);
  EXPECT_THAT(operators, Not(Contains("gemm"))) << "kernels are none";
}

/// As in Python's traces: the kernels' names tell of NCCL's operations.
TEST(TraceAnalysis, KernelsOfNcclAreCommunicationWhereNothingElseTells) {
  const TemporaryFolder folder;
  SyntheticTrace trace({.world_size = 1, .tells_process = false});
  trace.add_step(1, 0, 100 * kMs);
  trace.add_operator("aten::mm", 0, 10 * kMs);
  trace.add_kernel("kernel", "gemm", 0, 60 * kMs);
  trace.add_kernel("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40 * kMs, 80 * kMs);
  trace.write(folder);
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  expect_shares(analysis.mean, {.data = 0,
                                .forward = 10,
                                .backward = 0,
                                .communication = 20,
                                .optimizer = 0,
                                .idle = 70,
                                .hidden_communication = 20,
                                .waiting = 0});
}

/// Which have blocks at the same addresses.
TEST(TraceAnalysis, MemoryPeaksAreOfEachDevice) {
  const TemporaryFolder folder;
  SyntheticTrace trace({.world_size = 1});
  trace.add_step(1, 0, 100 * kMs);
  trace.add("user_annotation", "forward", 0, 40 * kMs);
  trace.add_operator("autograd::engine::evaluate_function: MmBackward0", 50 * kMs, 90 * kMs);
  for (const int64_t gpu : {-1, 0, 1}) {
    const int64_t unit = int64_t{1} << (20 + gpu + 1);  // 1, 2 and 4 MiB
    trace.add_memory((10 + gpu) * kMs, unit, 0x10, gpu);
    trace.add_memory((20 + gpu) * kMs, unit, 0x20, gpu);
    trace.add_memory((30 + gpu) * kMs, -unit, 0x20, gpu);
    trace.add_memory((60 + gpu) * kMs, -unit, 0x10, gpu);
  }
  trace.write(folder);
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  const auto& memory = analysis.ranks.at(0).memory;
  ASSERT_EQ(memory.size(), 3);
  const char* const names[] = {"CPU", "CUDA 0", "CUDA 1"};
  for (size_t i = 0; i < memory.size(); ++i) {
    const int64_t unit = int64_t{1} << (20 + i);
    EXPECT_EQ(memory[i].device, names[i]);
    EXPECT_EQ(memory[i].bytes, 2 * unit);
    EXPECT_EQ(memory[i].activations, unit);
    EXPECT_EQ(memory[i].temporary, unit);
  }
  EXPECT_THAT(describe(analysis), HasSubstr("rank 0, CUDA 1: 8.0 MiB (inputs 0.0 MiB, activations 4.0 MiB"));
}

/// The cycle with the most is told, and a device of which there is nothing else.
TEST(TraceAnalysis, MemoryFromBeforeIsBesideThePeak) {
  const TemporaryFolder folder;
  const auto write = [&](int cycle, const nlohmann::ordered_json& held) {
    SyntheticTrace trace({.world_size = 1, .held = held});
    trace.add_operator("aten::mm", 0, kMs);
    trace.add_memory(0, 1 << 20, 0x10);
    trace.write(folder, "", cycle);
  };
  write(1, {{"CPU", {{"parameters", 4 << 20}, {"gradients", 2 << 20}, {"optimizer_state", 8 << 20}}},
            {"CUDA 1", {{"parameters", 3 << 20}}}});
  write(2, {{"CPU", {{"parameters", 4 << 20}, {"other", 1 << 30}}}});
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  const auto& memory = analysis.ranks.at(0).memory;
  ASSERT_EQ(memory.size(), 2);
  EXPECT_EQ(memory[0].bytes, 1 << 20);
  EXPECT_EQ(memory[0].held.parameters, 4 << 20);
  EXPECT_EQ(memory[0].held.total(), 14 << 20);
  EXPECT_EQ(memory[1].device, "CUDA 1");
  EXPECT_EQ(memory[1].bytes, 0);
  EXPECT_EQ(memory[1].held.total(), 3 << 20);
  EXPECT_THAT(describe(analysis),
              HasSubstr("; from before: parameters 4.0 MiB, gradients 2.0 MiB, optimizer state 8.0 MiB\n"));
  const json told = json::parse(to_json(analysis))["ranks"][0]["memory"];
  EXPECT_EQ(told[0]["held"]["optimizer_state"], 8 << 20);
  EXPECT_EQ(told[1]["held"], (json{{"parameters", 3 << 20}}));
}

TEST(TraceAnalysis, HeaderOfAnotherFormTellsOfNoMemory) {
  const TemporaryFolder folder;
  for (const char* held : {"7", "[]", R"({"CPU": 7})", R"({"CPU": {"parameters": "many"}})"}) {
    SyntheticTrace trace({.world_size = 1, .held = nlohmann::ordered_json::parse(held)});
    trace.add_operator("aten::mm", 0, kMs);
    trace.write(folder);
    EXPECT_THAT(analyze_traces(folder.path().string()).ranks.at(0).memory, IsEmpty()) << held;
  }
}

/// Views of one storage, storages of one memory, and what has none.
TEST(TraceAnalysis, MemoryFromBeforeIsCountedOnce) {
  const TemporaryFolder folder;
  const auto flat = torch::zeros({100});
  const auto alias = torch::from_blob(flat.mutable_data_ptr<float>() + 50, {60});
  const TellingHeldTensors telling([&](HeldTensors& held) {
    held.parameters = {flat.narrow(0, 0, 10), flat.narrow(0, 90, 10), alias};
    held.gradients = {torch::Tensor(), torch::empty({5}, torch::kMeta), torch::zeros({3})};
  });
  {
    Profiler profile({.activities = std::set{ProfilerActivity::kCpu},
                      .on_trace_ready = tensorboard_trace_handler(folder.path().string()),
                      .profile_memory = true});
    const auto recorded = torch::ones({2});
  }
  const HeldMemory held = analyze_traces(folder.path().string()).ranks.at(0).memory.at(0).held;
  EXPECT_EQ(held.parameters, 110 * 4);
  EXPECT_EQ(held.gradients, 3 * 4);
  EXPECT_EQ(held.optimizer_state, 0);
}

/// Operators of a GPU are launched while others' kernels communicate, and another thread gives back what nothing tells of.
TEST(TraceAnalysis, MemoryIsForWhatTheThreadDoesBesideCommunication) {
  const TemporaryFolder folder;
  SyntheticTrace trace({.rank = 0, .world_size = 1});
  trace.add_step(1, 0, 100 * kMs);
  trace.add("user_annotation", "forward", 0, 50 * kMs);
  trace.add_collective("all_reduce", 1, 10 * kMs, 60 * kMs);
  trace.add_operator("autograd::engine::evaluate_function: MmBackward0", 60 * kMs, 90 * kMs);
  trace.add_memory(20 * kMs, 1 << 20, 0x10);
  trace.add_memory(30 * kMs, 2 << 20, 0x20);
  trace.add_memory(40 * kMs, 4 << 20, 0x20);  // in the place of the one before
  trace.write(folder);
  const MemoryPeak peak = analyze_traces(folder.path().string()).ranks.at(0).memory.at(0);
  EXPECT_EQ(peak.activations, 5 << 20);
  EXPECT_EQ(peak.bytes, 5 << 20);
}

/// What Adam keeps for each parameter is known, and so are gradients and inputs.
TEST(TraceAnalysis, MemoryOfATrainingIsWhatItsTensorsTake) {
  const TemporaryFolder folder;
  const auto weight = torch::zeros({256, 256}).requires_grad_();
  const int64_t weight_bytes = 256 * 256 * 4, input_bytes = 64 * 256 * 4;
  torch::optim::Adam optimizer({weight}, torch::optim::AdamOptions(0.001));
  {
    Profiler profile({.activities = std::set{ProfilerActivity::kCpu},
                      .schedule = schedule({.active = 2, .repeat = 1}),
                      .on_trace_ready = tensorboard_trace_handler(folder.path().string()),
                      .profile_memory = true});
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      torch::Tensor input, loss;
      {
        const RecordFunction scope("data");
        input = torch::ones({64, 256});
      }
      {
        const RecordFunction scope("forward");
        loss = torch::mm(input, weight).pow(2).sum();
      }
      loss.backward();
      {
        const RecordFunction scope("optimizer");
        optimizer.step();
      }
      profile.step();
    }
  }
  const MemoryPeak peak = analyze_traces(folder.path().string()).ranks.at(0).memory.at(0);
  EXPECT_EQ(peak.optimizer_state, 2 * weight_bytes);
  EXPECT_EQ(peak.gradients, weight_bytes);
  EXPECT_EQ(peak.inputs, input_bytes);
  EXPECT_EQ(peak.other, 0);
  EXPECT_EQ(peak.bytes,
            peak.inputs + peak.activations + peak.gradients + peak.optimizer_state + peak.temporary);
}

TEST(TraceAnalysis, TellsWhatIsMissing) {
  const TemporaryFolder folder;
  SyntheticTrace trace({.rank = 0, .world_size = 4});
  trace.add_operator("aten::mm", 0, kMs);
  trace.write(folder);
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  EXPECT_THAT(analysis.notes, Contains(HasSubstr("no marks of steps")));
  EXPECT_THAT(analysis.notes, Contains(HasSubstr("1 ranks of 4")));
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
