#include <gmock/gmock.h>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/transport/group_layout.h>

namespace lockstep::transport::group_layout_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(GroupLayout, OneHostHasAllMembersInGroupOrder) {
  const auto layout = GroupLayout::make({7, 7, 7}, 1);
  EXPECT_FALSE(layout.spans_hosts());
  EXPECT_EQ(layout.size(), 3);
  EXPECT_THAT(layout.neighbours(), ElementsAre(0, 1, 2));
  EXPECT_EQ(layout.place(), 1);
  EXPECT_EQ(layout.slices(), 3);
  EXPECT_THAT(layout.counterparts(), IsEmpty());
}

TEST(GroupLayout, HostsStandInTheOrderOfTheirFirstMember) {
  const auto layout = GroupLayout::make({5, 2, 5, 9, 2, 5}, 4);
  EXPECT_TRUE(layout.spans_hosts());
  EXPECT_THAT(layout.hosts, ElementsAre(ElementsAre(0, 2, 5), ElementsAre(1, 4), ElementsAre(3)));
  EXPECT_THAT(layout.host_of, ElementsAre(0, 1, 0, 2, 1, 0));
  EXPECT_THAT(layout.place_of, ElementsAre(0, 0, 1, 0, 1, 2));
  EXPECT_EQ(layout.host(), 1);
  EXPECT_EQ(layout.place(), 1);
  EXPECT_THAT(layout.neighbours(), ElementsAre(1, 4));
  EXPECT_EQ(layout.slices(), 1);
}

TEST(GroupLayout, EachRankHasACounterpartOnEachOtherHostAndIsItsOwn) {
  const std::vector<int> hosts{5, 2, 5, 9, 2, 5, 5};
  std::vector<std::vector<int>> counterparts;
  for (int rank = 0; rank < 7; ++rank) {
    const auto layout = GroupLayout::make(hosts, rank);
    counterparts.push_back(layout.counterparts());
    std::vector<bool> met(layout.hosts.size());
    for (const int other : counterparts.back()) met[layout.host_of[other]] = true;
    met[layout.host()] = true;
    EXPECT_THAT(met, ElementsAre(true, true, true)) << "rank " << rank;
  }
  for (int rank = 0; rank < 7; ++rank) {
    for (const int other : counterparts[rank]) EXPECT_THAT(counterparts[other], ::testing::Contains(rank));
  }
  EXPECT_THAT(counterparts[0], ElementsAre(1, 3));
  EXPECT_THAT(counterparts[1], ElementsAre(0, 5, 3));
}

}  // namespace
}  // namespace lockstep::transport::group_layout_test
