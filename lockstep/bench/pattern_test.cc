#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/bench/internal/pattern.h>

namespace lockstep::bench::pattern_test {

using internal::Contributions;
using internal::Pattern;
using internal::RedOpType;

namespace {

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar,
                                     at::kByte,  at::kShort,  at::kInt,  at::kLong};
// Two whole periods and a part of one.
constexpr int64_t kLength = 2 * Pattern::kPeriod + 100;

at::Tensor filled(const Pattern& pattern, at::ScalarType type, int64_t elements, int64_t first = 0) {
  const at::Tensor tensor = at::empty({elements}, type);
  pattern.fill(tensor.mutable_data_ptr(), elements, first);
  return tensor;
}

int64_t wrong_in(const at::Tensor& tensor, const Pattern& pattern, int64_t first = 0) {
  return pattern.count_wrong(tensor.const_data_ptr(), tensor.numel(), first);
}

TEST(Pattern, FillsByIndexWithItsPeriod) {
  for (const at::ScalarType type : kTypes) {
    const Pattern pattern(type, kLength, [](int64_t index) { return static_cast<double>(index % 100); });
    const at::Tensor tensor = filled(pattern, type, kLength);
    for (const int64_t index :
         {int64_t{0}, int64_t{99}, Pattern::kPeriod - 1, Pattern::kPeriod, kLength - 1}) {
      EXPECT_EQ(tensor[index].item<double>(), static_cast<double>(index % Pattern::kPeriod % 100)) << type;
    }
    EXPECT_EQ(wrong_in(tensor, pattern), 0) << type;
  }
}

TEST(Pattern, EveryWrongElementIsCountedInEveryType) {
  const Contributions data(at::kFloat, std::nullopt, 2, kLength);
  for (const at::ScalarType type : kTypes) {
    const Contributions of_type(type, std::nullopt, 2, kLength);
    at::Tensor tensor = filled(of_type.of(0, 3), type, kLength);
    for (const int64_t index : {int64_t{0}, Pattern::kPeriod, kLength - 1}) tensor[index] += 1;
    EXPECT_EQ(wrong_in(tensor, of_type.of(0, 3)), 3) << type;
  }
}

TEST(Pattern, NotANumberIsWrongAndMinusZeroIsNot) {
  const Pattern zeros(at::kFloat, 8, [](int64_t) { return 0.0; });
  at::Tensor tensor = at::zeros({8});
  tensor[1] = -0.0;
  EXPECT_EQ(wrong_in(tensor, zeros), 0);
  tensor[2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(wrong_in(tensor, zeros), 1);
  const Pattern tolerant(
      at::kFloat, 8, [](int64_t) { return 0.0; }, 0.5);
  EXPECT_EQ(wrong_in(tensor, tolerant), 1);
}

TEST(Pattern, APartIsComparedFromItsOwnIndex) {
  const Contributions data(at::kInt, std::nullopt, 2, kLength);
  const at::Tensor part = filled(data.of(1, 0), at::kInt, 500, Pattern::kPeriod - 10);
  EXPECT_EQ(wrong_in(part, data.of(1, 0), Pattern::kPeriod - 10), 0);
  EXPECT_GT(wrong_in(part, data.of(1, 0), Pattern::kPeriod - 11), 400);
  EXPECT_GT(wrong_in(part, data.of(1, 0), 0), 400);
}

TEST(Contributions, DifferByRankIterationAndPosition) {
  const Contributions data(at::kFloat, std::nullopt, 4, kLength);
  const at::Tensor tensor = filled(data.of(1, 7), at::kFloat, kLength);
  const auto mostly = static_cast<int64_t>(0.9 * kLength);  // 1 in 128 agrees by chance
  EXPECT_GT(wrong_in(tensor, data.of(2, 7)), mostly);
  EXPECT_GT(wrong_in(tensor, data.of(1, 8)), mostly);
  EXPECT_GT(wrong_in(tensor, data.of(1, 7), 1024), mostly);
}

struct Reduction {
  RedOpType op;
  at::Tensor (*fold)(const at::Tensor& stacked);
};

// The oracle is torch's arithmetic on the very data that the ranks would contribute.
TEST(Contributions, TheReductionIsWhatTorchComputes) {
  const Reduction reductions[] = {
      {RedOpType::SUM, [](const at::Tensor& all) { return all.sum(0); }},
      {RedOpType::AVG,
       [](const at::Tensor& all) {
         return all.is_floating_point() ? all.mean(0) : all.sum(0).div(all.size(0), "trunc");
       }},
      {RedOpType::PRODUCT, [](const at::Tensor& all) { return all.prod(0); }},
      {RedOpType::MIN, [](const at::Tensor& all) { return all.amin(0); }},
      {RedOpType::MAX, [](const at::Tensor& all) { return all.amax(0); }},
  };
  for (const int ranks : {1, 2, 3, 8, 130}) {
    for (const auto& [op, fold] : reductions) {
      for (const at::ScalarType type : kTypes) {
        const Contributions data(type, op, ranks, 300);
        std::vector<at::Tensor> all;
        for (int rank = 0; rank < ranks; ++rank) {
          all.push_back(
              filled(data.of(rank, 5), type, 300).to(at::isFloatingType(type) ? at::kDouble : at::kLong));
        }
        const at::Tensor result = fold(at::stack(all)).to(type);
        EXPECT_EQ(wrong_in(result, data.reduced(5)), 0)
            << ranks << " ranks, operation " << int{op} << ", " << type;
        EXPECT_GT(wrong_in(result + 1, data.reduced(5)), 290)
            << "a wrong sum is not noticed: " << int{op} << type;
      }
    }
  }
}

TEST(Contributions, BitOperationsAreWhatTorchComputes) {
  const Contributions data(at::kByte, RedOpType::BAND, 2, 300);
  const at::Tensor a = filled(data.of(0, 1), at::kByte, 300), b = filled(data.of(1, 1), at::kByte, 300);
  EXPECT_EQ(wrong_in(a.bitwise_and(b), data.reduced(1)), 0);
  EXPECT_EQ(wrong_in(a.bitwise_or(b), Contributions(at::kByte, RedOpType::BOR, 2, 300).reduced(1)), 0);
  EXPECT_EQ(wrong_in(a.bitwise_xor(b), Contributions(at::kByte, RedOpType::BXOR, 2, 300).reduced(1)), 0);
  EXPECT_GT(wrong_in(a.bitwise_xor(b), data.reduced(1)), 0);
}

}  // namespace
}  // namespace lockstep::bench::pattern_test
