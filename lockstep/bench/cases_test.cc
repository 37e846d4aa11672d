#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/bench/internal/cases.h>
#include <lockstep/bench/internal/measure.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::bench::cases_test {

using namespace internal;

namespace {

using lockstep::testing::run_ranks;

/// Calls visit(plan's info, placement, count, case) for everything in the plan.
template <class Visit>
void for_each_case(const Plan& plan, int rank, Visit visit) {
  const Buffers buffers = allocate_buffers(plan);
  for (const Step& step : plan.steps) {
    for (const Placement placement : step.placements) {
      for (const int64_t count : step.counts) {
        visit(*step.info, placement, count, make_case(plan, *step.info, placement, count, rank, buffers));
      }
    }
  }
}

std::string name_of(const CollectiveInfo& info, Placement placement, int64_t count) {
  return std::string(info.name) + (placement == Placement::kInPlace ? " in place, " : ", ") +
         std::to_string(count) + " elements";
}

int64_t total(int64_t mine) {
  const at::Tensor sum = at::full({1}, mine, at::kLong);
  all_reduce(sum);
  return sum.item<int64_t>();
}

BenchOptions options_for(int rank_count, MemoryKind memory) {
  // From one element to more than a period of the data, and than what is sent as a small message.
  return {.min_bytes = 4, .max_bytes = 100'000, .step_factor = 29, .root = rank_count - 1, .memory = memory};
}

void all_results_are_right(int ranks, MemoryKind memory) {
  run_ranks(ranks, [=](int rank) {
    auto world = init_process_group();
    for_each_case(make_plan(options_for(ranks, memory), ranks), rank,
                  [&](const CollectiveInfo& info, Placement placement, int64_t count, const Case& one) {
                    const Sample sample = measure(one, 3, 1, [](int64_t) {});
                    EXPECT_EQ(sample.wrong, 0) << name_of(info, placement, count);
                    EXPECT_EQ(sample.nanoseconds.size(), 3u);
                  });
  });
}

TEST(BenchCases, AllResultsAreRightOnTwoRanksInTheArena) {
  all_results_are_right(2, MemoryKind::kArena);
}
TEST(BenchCases, AllResultsAreRightOnThreeRanksStaged) {
  all_results_are_right(3, MemoryKind::kStaged);
}
TEST(BenchCases, AllResultsAreRightOnOneRank) {
  all_results_are_right(1, MemoryKind::kArena);
}

TEST(BenchCases, EveryTypeAndOperationIsRight) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    int tried = 0;
    for (const char* dtype :
         {"float", "double", "half", "bfloat16", "int8", "uint8", "int16", "int32", "int64"}) {
      for (const char* op : {"sum", "prod", "min", "max", "avg", "band", "bor", "bxor"}) {
        BenchOptions options{
            .collectives = {"all_reduce", "reduce_scatter"}, .min_bytes = 20'000, .max_bytes = 20'000};
        options.dtype = dtype;
        options.reduce_op = op;
        Plan plan;
        try {
          plan = make_plan(options, 2);
        } catch (const c10::ValueError&) {
          continue;  // bits of floats
        }
        ++tried;
        for_each_case(plan, rank,
                      [&](const CollectiveInfo& info, Placement placement, int64_t count, const Case& one) {
                        EXPECT_EQ(measure(one, 1, 0, [](int64_t) {}).wrong, 0)
                            << name_of(info, placement, count) << " " << dtype << " " << op;
                      });
      }
    }
    EXPECT_EQ(tried, 4 * 5 + 5 * 8);  // floating-point types and operations, integer ones
  });
}

// A collective that does nothing, though the data of the iteration before may still lie in the result.
TEST(BenchCases, AMissingResultIsCounted) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    BenchOptions options = options_for(2, MemoryKind::kArena);
    options.min_bytes = options.max_bytes;
    for_each_case(make_plan(options, 2), rank,
                  [&](const CollectiveInfo& info, Placement placement, int64_t count, Case one) {
                    if (info.collective == Collective::kBarrier) return;
                    const Sample right = measure(one, 1, 0, [](int64_t) {});
                    EXPECT_EQ(right.wrong, 0) << name_of(info, placement, count);
                    one.prepare(1);
                    EXPECT_GT(total(one.count_wrong(1)), 0) << name_of(info, placement, count);
                  });
  });
}

TEST(BenchCases, ASingleWrongElementOnOneRankIsCountedOnAll) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const Plan plan = make_plan({.collectives = {"all_reduce"}, .min_bytes = 40'000, .max_bytes = 40'000}, 3);
    const Buffers buffers = allocate_buffers(plan);
    Case broken = make_case(plan, *plan.steps[0].info, Placement::kInPlace, 10'000, rank, buffers);
    broken.run = [run = broken.run, buffers, rank] {
      run();
      if (rank == 1) buffers.first[9'876] += 1;
    };
    // Two timed iterations and one before them.
    EXPECT_EQ(measure(broken, 2, 1, [](int64_t) {}).wrong, 3);
  });
}

}  // namespace
}  // namespace lockstep::bench::cases_test
