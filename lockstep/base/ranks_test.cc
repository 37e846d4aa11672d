#include <numeric>

#include <gtest/gtest.h>

#include <lockstep/base/ranks.h>

namespace lockstep::ranks_test {
namespace {

TEST(Ranks, JoinsNeighboursAndSorts) {
  EXPECT_EQ(format_ranks({}), "none");
  EXPECT_EQ(format_ranks({7}), "7");
  EXPECT_EQ(format_ranks({4, 3}), "3 and 4");
  EXPECT_EQ(format_ranks({9, 5, 1, 4, 3, 3}), "1, 3-5 and 9");
  EXPECT_EQ(format_ranks({0, 1, 2}), "0-2");
  EXPECT_EQ(format_ranks({3, 5, 6}), "3, 5 and 6");
}

TEST(Ranks, ShortensLongLists) {
  EXPECT_EQ(format_ranks({0, 2, 4, 6, 8}, 3), "0, 2, 4 and 2 more");
  std::vector<int> all(1000);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(format_ranks(all), "0-999");
  std::vector<int> even;
  for (int i = 0; i < 1000; i += 2) even.push_back(i);
  EXPECT_EQ(format_ranks(even, 2), "0, 2 and 498 more");
}

TEST(Ranks, NamesOneAndMany) {
  EXPECT_EQ(name_ranks({3}), "rank 3");
  EXPECT_EQ(name_ranks({3, 3}), "rank 3");
  EXPECT_EQ(name_ranks({5, 3}), "ranks 3 and 5");
}

}  // namespace
}  // namespace lockstep::ranks_test
