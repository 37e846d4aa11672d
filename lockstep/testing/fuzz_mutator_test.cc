#include <gmock/gmock.h>
#include <set>

#include <gtest/gtest.h>

#include <lockstep/testing/fuzz_mutator.h>

namespace lockstep::testing::fuzz_mutator_test {
namespace {

using ::testing::Each;
using ::testing::Ge;
using ::testing::SizeIs;

std::vector<std::string> mutations(uint64_t seed, size_t max_length, const std::string& input,
                                   const std::string& other, int count) {
  FuzzMutator mutator(seed, max_length);
  std::vector<std::string> all;
  for (int i = 0; i < count; ++i) all.push_back(mutator.mutate(input, other));
  return all;
}

TEST(FuzzMutator, TheSameSeedGivesTheSameInputs) {
  const auto first = mutations(7, 100, "key=12,other=7", "[x]", 200);
  EXPECT_EQ(first, mutations(7, 100, "key=12,other=7", "[x]", 200));
  EXPECT_NE(first, mutations(8, 100, "key=12,other=7", "[x]", 200));
}

TEST(FuzzMutator, MostInputsDifferFromWhereTheyCameFrom) {
  const auto all = mutations(1, 100, "key=12,other=7", "[x]", 1000);
  EXPECT_THAT(std::set<std::string>(all.begin(), all.end()), SizeIs(Ge(800u)));
}

TEST(FuzzMutator, NothingIsLongerThanAllowed) {
  for (const size_t most : {1, 2, 7, 64}) {
    for (const char* input : {"", "1", "0123456789", "{\"a\": [1, 2, 3]}"}) {
      for (const char* other : {"", "a long one to splice from"}) {
        EXPECT_THAT(mutations(3, most, input, other, 500), Each(SizeIs(::testing::Le(most))));
      }
    }
  }
}

TEST(FuzzMutator, ReachesWhatParsersGetWrong) {
  const auto all = mutations(5, 256, "n=12;[a]", "", 20'000);
  const auto reached = [&](auto predicate) { return std::any_of(all.begin(), all.end(), predicate); };
  const auto contains = [&](const std::string& text) {
    return reached([&](const std::string& input) { return input.find(text) != std::string::npos; });
  };
  EXPECT_TRUE(contains("n=18446744073709551615"));  // a number that does not fit
  EXPECT_TRUE(contains("n=-1;"));                   // a negative one
  EXPECT_TRUE(contains("[[[["));                    // nesting
  EXPECT_TRUE(contains(std::string(4, '\xff')));    // a length field at its end
  EXPECT_TRUE(contains(std::string("\0", 1)));      // a zero byte
  EXPECT_TRUE(reached([](auto& input) { return input.empty(); }));
  EXPECT_TRUE(reached([](auto& input) { return input.size() == 256; }));
}

}  // namespace
}  // namespace lockstep::testing::fuzz_mutator_test
