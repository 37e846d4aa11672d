#include <algorithm>
#include <array>
#include <cstdint>
#include <gmock/gmock.h>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/profiler/testing/expect_shares.h>
#include <lockstep/profiler/testing/synthetic_trace.h>
#include <lockstep/profiler/trace_analysis.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::profiler::trace_shares_test {
namespace {

using lockstep::testing::TemporaryFolder;
using ::testing::Contains;
using testing::expect_shares;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::SyntheticTrace;

constexpr int64_t kMs = 1'000'000;

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
TEST(TraceShares, SharesOfRandomStepsAreThoseOfTheTrace) {
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

/// What the host does beside it hides nothing, and kernels that communicate do not compute.
TEST(TraceShares, CommunicationOfAGpuIsExposedWhereNoKernelRunsBesideIt) {
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
TEST(TraceShares, KernelsOfNcclAreCommunicationWhereNothingElseTells) {
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

}  // namespace
}  // namespace lockstep::profiler::trace_shares_test
