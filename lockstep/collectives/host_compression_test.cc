#include <gmock/gmock.h>
#include <memory>
#include <optional>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// The option between_hosts: where it comes from, and that all ranks must have the same.
namespace lockstep::host_compression_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

constexpr int64_t kLarge = 4096;

TEST(BetweenHosts, ChangesNothingOnOneHost) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group({.between_hosts = HostCompression::kInt8});
    const at::Tensor mine = at::arange(kLarge, at::kFloat).mul(1e-3).add(rank);
    const at::Tensor expected =
        at::arange(kLarge, at::kFloat).mul(1e-3).add(at::arange(kLarge, at::kFloat).mul(1e-3).add(1));
    at::Tensor sum = mine.clone();
    all_reduce(sum);
    EXPECT_TRUE(at::equal(sum, expected));
    const BetweenHosts scope(HostCompression::kBf16);
    sum = mine.clone();
    all_reduce(sum);
    EXPECT_TRUE(at::equal(sum, expected));
  });
}

TEST(BetweenHosts, RanksThatDisagreeAreRefused) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const BetweenHosts scope(rank == 0 ? HostCompression::kBf16 : HostCompression::kInt8,
                             std::make_shared<ErrorFeedback>());
    // What is not encoded in any case may differ.
    at::Tensor small = at::ones({kLarge - 1}), wide = at::ones({kLarge}, at::kDouble),
               largest = at::ones({kLarge});
    all_reduce(small);
    all_reduce(wide);
    all_reduce(largest, ReduceOp::MAX);
    broadcast(largest, 0);
    at::Tensor large = at::ones({kLarge});
    EXPECT_THAT(message_of([&] { all_reduce(large); }),
                AllOf(HasSubstr("rank 0: all_reduce(SUM, Float [4096], bf16 between hosts)"),
                      HasSubstr("rank 1: all_reduce(SUM, Float [4096], int8 between hosts)")));
    EXPECT_TRUE(at::equal(large, at::ones({kLarge})));
  });
}

TEST(BetweenHosts, TheInnermostScopeHolds) {
  EXPECT_FALSE(BetweenHosts::compression().has_value());
  {
    const auto feedback = std::make_shared<ErrorFeedback>();
    const BetweenHosts outer(HostCompression::kInt8, feedback);
    EXPECT_EQ(BetweenHosts::feedback(), feedback);
    {
      const BetweenHosts inner(std::nullopt);
      EXPECT_FALSE(BetweenHosts::compression().has_value()) << "the group's holds";
      EXPECT_EQ(BetweenHosts::feedback(), nullptr);
    }
    EXPECT_EQ(BetweenHosts::compression(), HostCompression::kInt8);
  }
  EXPECT_FALSE(BetweenHosts::compression().has_value());
}

/// What a group has shows in the text of an operation that its ranks call with different ones.
std::string described(const ProcessGroup& group) {
  std::optional<BetweenHosts> scope;
  if (get_rank(group) == 0) scope.emplace(HostCompression::kNone);
  return message_of([&] {
    at::Tensor tensor = at::ones({kLarge});
    all_reduce(tensor, ReduceOp::SUM, group);
  });
}

TEST(BetweenHosts, AGroupHasItsOwnAndPassesItOn) {
  run_ranks(2, [](int) {
    auto world = init_process_group({.between_hosts = HostCompression::kBf16});
    const ProcessGroup bytes = new_group({}, {}, {.between_hosts = HostCompression::kInt8});
    const ProcessGroup plain = new_group();
    at::Tensor tensor = at::ones({kLarge});
    {
      const BetweenHosts scope(HostCompression::kNone);
      all_reduce(tensor, ReduceOp::SUM, plain);
    }
    all_reduce(tensor, ReduceOp::SUM, plain);
    const ProcessGroup part = split_group(bytes, {{0, 1}});
    EXPECT_THAT(described(part), HasSubstr("rank 1: all_reduce(SUM, Float [4096], int8 between hosts)"));
    EXPECT_THAT(described(bytes), HasSubstr("int8 between hosts"));
    EXPECT_THAT(described({}), HasSubstr("bf16 between hosts"));
  });
}

TEST(BetweenHosts, ADefaultGroupIsMadeOnlyIfAllAskForTheSame) {
  run_ranks(3, [](int rank) {
    const auto mine = rank == 2 ? HostCompression::kInt8 : HostCompression::kNone;
    EXPECT_THAT(message_of([&] { auto world = init_process_group({.between_hosts = mine}); }),
                HasSubstr("ranks 0 and 1: init_process_group(between_hosts none); "
                          "rank 2: init_process_group(between_hosts int8)"));
    EXPECT_FALSE(is_initialized());
  });
}

TEST(BetweenHosts, AGroupIsMadeOnlyIfAllAskForTheSame) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto mine = rank == 0 ? HostCompression::kNone : HostCompression::kInt8;
    EXPECT_THAT(message_of([&] { new_group({}, {}, {.between_hosts = mine}); }),
                HasSubstr("int8 between hosts"));
    EXPECT_THAT(message_of([&] {
                  new_group({0, 1}, {}, {.use_local_synchronization = true, .between_hosts = mine});
                }),
                HasSubstr("int8 between hosts"));
  });
}

TEST(BetweenHosts, OtherNumbersAreRefused) {
  const auto none = static_cast<HostCompression>(3);
  EXPECT_THAT(message_of<c10::ValueError>([&] { auto world = init_process_group({.between_hosts = none}); }),
              HasSubstr("init_process_group: between_hosts is 3, which is no HostCompression"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { const BetweenHosts scope(none); }), HasSubstr("is 3"));
}

TEST(ErrorFeedback, BeginsAnewWithAnotherSizeOrDivisor) {
  ErrorFeedback feedback;
  feedback.of_partial(3, 1)[1] = 5;
  feedback.of_result(3, 1)[1] = 7;
  EXPECT_EQ(feedback.of_partial(3, 1)[1], 5);
  EXPECT_EQ(feedback.of_partial(2, 1)[1], 0);
  EXPECT_EQ(feedback.of_result(3, 1)[1], 7);
  EXPECT_EQ(feedback.of_result(3, 4)[1], 0) << "an average of 4 ranks after a sum";
}

}  // namespace
}  // namespace lockstep::host_compression_test
