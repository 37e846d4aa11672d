#include <gmock/gmock.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/bench/internal/plan.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::bench::plan_test {

using namespace internal;

namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

Plan plan_for(BenchOptions options, int ranks = 2) {
  return make_plan(options, ranks);
}

TEST(ParseSize, TakesNumbersWithBinarySuffixes) {
  const std::pair<const char*, int64_t> sizes[] = {
      {"1", 1},       {"4096", 4096},      {"4K", 4096},      {"4k", 4096}, {"4KB", 4096},
      {"4KiB", 4096}, {"100M", 104857600}, {"1GiB", 1 << 30}, {"8B", 8},    {"2T", int64_t{2} << 40},
  };
  for (const auto& [text, bytes] : sizes) EXPECT_EQ(parse_size(text, "--begin"), bytes) << text;
}

TEST(ParseSize, RefusesAnythingElseAndNamesTheOption) {
  for (const char* text : {"", "K", "4X", "4.5M", "4KK", "4 K", "-4K", "0", "0x10", "4iB", "99999999T",
                           "9999999999999999999", "1125899906842625"}) {
    EXPECT_THAT(message_of<c10::ValueError>([&] { parse_size(text, "--end"); }),
                AllOf(HasSubstr("--end"), HasSubstr("'" + std::string(text) + "'")));
  }
}

TEST(Plan, SizesGoUpByTheFactorInWholeElements) {
  const Plan plan =
      plan_for({.collectives = {"all_reduce", "all_gather", "barrier"}, .min_bytes = 6, .max_bytes = 100}, 3);
  ASSERT_EQ(plan.steps.size(), 3u);
  EXPECT_THAT(plan.steps[0].counts, ElementsAre(1, 6, 24));  // 6, 24, 96 bytes
  EXPECT_THAT(plan.steps[1].counts, ElementsAre(1, 2, 8));   // of each of three ranks
  EXPECT_THAT(plan.steps[2].counts, ElementsAre(0));
}

TEST(Plan, SizesThatRoundToTheSameAreMeasuredOnce) {
  const Plan plan =
      plan_for({.collectives = {"broadcast"}, .min_bytes = 1, .max_bytes = 16, .step_factor = 2});
  EXPECT_THAT(plan.steps.at(0).counts, ElementsAre(1, 2, 4));
}

TEST(Plan, TheLargestPossibleSizeDoesNotOverflow) {
  const int64_t most = int64_t{1} << 50;
  const Plan plan =
      plan_for({.collectives = {"broadcast"}, .min_bytes = most, .max_bytes = most, .step_factor = 1 << 20});
  EXPECT_THAT(plan.steps.at(0).counts, ElementsAre(most / 4));
  EXPECT_EQ(plan.memory_bytes(), 2 * most);
}

TEST(Plan, OneBoundMovesTheOther) {
  EXPECT_EQ(plan_for({.max_bytes = 16}).min_bytes, 16);
  EXPECT_EQ(plan_for({.min_bytes = int64_t{1} << 30}).max_bytes, int64_t{1} << 30);
  EXPECT_EQ(plan_for({}).min_bytes, 1024);
  EXPECT_EQ(plan_for({}).max_bytes, 16 << 20);
}

TEST(Plan, TheDefaultSetIsEverythingThatCanRun) {
  EXPECT_EQ(plan_for({}).steps.size(), all_collectives().size());
  EXPECT_EQ(plan_for({.collectives = {"all"}}).steps.size(), all_collectives().size());
  for (const Step& step : plan_for({}, 1).steps) EXPECT_LE(step.info->min_ranks, 1) << step.info->name;
  for (const Step& step : plan_for({.in_place = false}).steps)
    EXPECT_TRUE(step.info->out_of_place) << step.info->name;
}

TEST(Plan, NamesOfFunctionsDoAndNothingIsMeasuredTwice) {
  const Plan plan = plan_for({.collectives = {"all_gather_into_tensor", "all_gather", "all_to_all_single"}});
  ASSERT_EQ(plan.steps.size(), 2u);
  EXPECT_STREQ(plan.steps[0].info->name, "all_gather");
  EXPECT_THAT(plan.steps[0].placements, ElementsAre(Placement::kOutOfPlace, Placement::kInPlace));
  EXPECT_STREQ(plan.steps[1].info->name, "all_to_all");
}

TEST(Plan, BuffersAreTheLargestOfAllSteps) {
  const Plan plan = plan_for({.collectives = {"all_gather"}, .min_bytes = 1200, .max_bytes = 1200}, 3);
  EXPECT_EQ(plan.buffers.first, 300);   // in place
  EXPECT_EQ(plan.buffers.second, 300);  // out of place
  EXPECT_EQ(plan.memory_bytes(), 3 * 600 * 4);
  EXPECT_EQ(plan_for({.collectives = {"all_reduce"}, .min_bytes = 4000, .max_bytes = 4000}).memory_bytes(),
            2 * 4000);
}

TEST(Plan, MisuseIsNamedWithTheRemedy) {
  const auto words = [](BenchOptions options, int ranks = 2) {
    return message_of<c10::ValueError>([&] { make_plan(options, ranks); });
  };
  EXPECT_THAT(words({.collectives = {"allreduce"}}),
              AllOf(HasSubstr("'allreduce'"), HasSubstr("all_reduce"), HasSubstr("pingpong")));
  EXPECT_THAT(words({.min_bytes = 8192, .max_bytes = 4096}),
              AllOf(HasSubstr("8.0 KiB"), HasSubstr("4.0 KiB"), HasSubstr("swap")));
  EXPECT_THAT(words({.min_bytes = 0}), HasSubstr("at least 1 byte"));
  EXPECT_THAT(words({.step_factor = 1}),
              AllOf(HasSubstr("--factor is 1"), HasSubstr("same --begin and --end")));
  EXPECT_THAT(words({.iterations = 0}), HasSubstr("--iters is 0"));
  EXPECT_THAT(words({.warmup = -1}), HasSubstr("--warmup is -1"));
  EXPECT_THAT(words({.dtype = "complex64"}), AllOf(HasSubstr("'complex64'"), HasSubstr("bfloat16")));
  EXPECT_THAT(words({.reduce_op = "mean"}), AllOf(HasSubstr("'mean'"), HasSubstr("avg")));
  EXPECT_THAT(words({.reduce_op = "bxor"}), AllOf(HasSubstr("bxor"), HasSubstr("float"), HasSubstr("int32")));
  EXPECT_THAT(words({.root = 2}), AllOf(HasSubstr("--root is 2"), HasSubstr("0 to 1")));
  EXPECT_THAT(words({.root = -1}), HasSubstr("--root is -1"));
  EXPECT_THAT(words({.timeout = std::chrono::milliseconds(0)}), HasSubstr("--timeout"));
  EXPECT_THAT(words({.collectives = {"all_reduce"}, .in_place = false}), HasSubstr("in place only"));
  EXPECT_THAT(words({.collectives = {"all_to_all"}, .out_of_place = false}), HasSubstr("out of place only"));
  EXPECT_THAT(words({.collectives = {"pingpong"}}, 1),
              AllOf(HasSubstr("at least 2 ranks"), HasSubstr("--nproc-per-node")));
}

TEST(Plan, TheOperationMattersOnlyWhereSomethingIsReduced) {
  EXPECT_EQ(plan_for({.collectives = {"broadcast"}, .dtype = "float", .reduce_op = "band"}).steps.size(), 1u);
  EXPECT_EQ(plan_for({.collectives = {"all_reduce"}, .dtype = "INT", .reduce_op = "product"}).op_name,
            "prod");
}

TEST(MemoryObjection, ComparesWithTheTighterLimitAndNamesTheRemedy) {
  const int64_t mebibyte = 1 << 20;
  const Plan plan = plan_for({.collectives = {"all_reduce"}, .min_bytes = 512 * mebibyte});
  EXPECT_EQ(memory_objection(plan, {.available = 2000 * mebibyte}), std::nullopt);
  EXPECT_THAT(
      memory_objection(plan, {.available = 1050 * mebibyte}).value_or(""),
      AllOf(HasSubstr("1.0 GiB"), HasSubstr("MemAvailable"), HasSubstr("--end"), HasSubstr("fewer ranks")));
  EXPECT_THAT(memory_objection(plan, {.available = 2000 * mebibyte, .cgroup_left = 0}).value_or(""),
              HasSubstr("control group"));
}

}  // namespace
}  // namespace lockstep::bench::plan_test
