#include <algorithm>
#include <gmock/gmock.h>
#include <random>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/optim/partition.h>

namespace lockstep::partition_test {
namespace {

TEST(PartitionParameters, LargestFirstToTheRankThatHasLeast) {
  // 9 → 0, 7 → 1, 6 → 2, then 4 → 2 (10), 3 → 1 (10), 3 → 0 (12), 1 → 1 (11)
  const auto partition = partition_parameters({{3, 9, 4, 7, 3, 6, 1}}, 3);
  EXPECT_EQ(partition, (Partition{{{1, 4}}, {{3, 0, 6}}, {{5, 2}}}));
}

TEST(PartitionParameters, GroupsFollowEachOtherAndRanksMayGetNothing) {
  EXPECT_EQ(partition_parameters({{4, 2}, {3}}, 2), (Partition{{{0}, {}}, {{1}, {0}}}));
  EXPECT_EQ(partition_parameters({{5}}, 3), (Partition{{{0}}, {{}}, {{}}}));
  EXPECT_EQ(partition_parameters({{5, 5, 5}}, 1), (Partition{{{0, 1, 2}}}));
  EXPECT_THROW(partition_parameters({{5}}, 0), c10::ValueError);
}

TEST(PartitionParameters, EveryParameterHasOneOwnerAndNoRankCarriesMuchMore) {
  std::mt19937 random(7);
  const auto below = [&](int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
  };
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<std::vector<int64_t>> numels(static_cast<size_t>(below(4)));
    for (auto& group : numels) {
      group.resize(static_cast<size_t>(below(20)));
      for (int64_t& numel : group) numel = below(1000);
    }
    const int world_size = static_cast<int>(1 + below(8));
    const auto partition = partition_parameters(numels, world_size);
    ASSERT_EQ(partition.size(), static_cast<size_t>(world_size));
    std::vector<std::vector<int>> owners;
    int64_t largest = 0;
    for (const auto& group : numels) {
      owners.emplace_back(group.size(), 0);
      for (const int64_t numel : group) largest = std::max(largest, numel);
    }
    std::vector<int64_t> loads;
    for (const auto& groups : partition) {
      ASSERT_EQ(groups.size(), numels.size());
      int64_t load = 0;
      for (size_t group = 0; group < groups.size(); ++group) {
        int64_t before = largest;
        for (const size_t index : groups[group]) {
          ++owners.at(group).at(index);
          ASSERT_LE(numels[group][index], before);
          before = numels[group][index];
          load += before;
        }
      }
      loads.push_back(load);
    }
    for (const auto& group : owners) EXPECT_THAT(group, ::testing::Each(1));
    const auto [least, most] = std::minmax_element(loads.begin(), loads.end());
    EXPECT_LE(*most - *least, largest);
    // A further group moves nothing.
    auto more = numels;
    more.push_back({17, 4});
    const auto extended = partition_parameters(more, world_size);
    for (size_t rank = 0; rank < partition.size(); ++rank) {
      for (size_t group = 0; group < numels.size(); ++group) {
        EXPECT_EQ(extended[rank][group], partition[rank][group]);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::partition_test
