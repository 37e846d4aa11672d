#include <algorithm>
#include <gmock/gmock.h>
#include <numeric>
#include <random>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/world_defaults.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/parquet/row_group_sampler.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::data::row_group_sampler_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Counts = std::vector<int64_t>;

RowGroupSampler sampler_of(const Counts& counts, int64_t ranks, int64_t rank, bool shuffle = true,
                           int64_t seed = 0) {
  return RowGroupSampler(counts, {.num_replicas = ranks, .rank = rank, .shuffle = shuffle, .seed = seed});
}

TEST(RowGroupSampler, EachRowGroupBelongsToOneRankInEachEpoch) {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    const auto ranks = static_cast<int64_t>(random() % 6 + 1);
    Counts counts(random() % 40);
    for (int64_t& rows : counts) rows = static_cast<int64_t>(random() % 1000);
    const bool shuffle = random() % 2 == 0;
    const auto seed = static_cast<int64_t>(random());
    Counts seen;
    Counts rows;
    int64_t fewest = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      auto sampler = sampler_of(counts, ranks, rank, shuffle, seed);
      sampler.set_epoch(round);
      const auto mine = sampler.indices();
      EXPECT_EQ(static_cast<int64_t>(mine.size()), sampler.size());
      rows.push_back(0);
      for (const int64_t group : mine) rows.back() += counts[static_cast<size_t>(group)];
      EXPECT_EQ(rows.back(), sampler.num_rows());
      fewest = sampler.fewest_rows();
      seen.insert(seen.end(), mine.begin(), mine.end());
    }
    std::sort(seen.begin(), seen.end());
    Counts all(counts.size());
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(seen, all);
    // No rank is ahead of another by more than one row group.
    const int64_t largest = counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
    const auto [least, most] = std::minmax_element(rows.begin(), rows.end());
    EXPECT_LE(*most - *least, largest);
    EXPECT_EQ(fewest, *least);
  }
}

TEST(RowGroupSampler, AssignsRowGroupsOfOneSizeInTurnsInTheOrderOfADistributedSampler) {
  const Counts counts(11, 8);
  DistributedSampler order(11, 1, 0, true, 3);
  order.set_epoch(2);
  const auto all = order.indices();
  for (int64_t rank = 0; rank < 3; ++rank) {
    auto sampler = sampler_of(counts, 3, rank, true, 3);
    sampler.set_epoch(2);
    Counts expected;
    for (size_t i = static_cast<size_t>(rank); i < all.size(); i += 3) expected.push_back(all[i]);
    EXPECT_EQ(sampler.indices(), expected);
  }
  EXPECT_THAT(sampler_of(counts, 3, 1, false).indices(), ElementsAre(1, 4, 7, 10));
}

TEST(RowGroupSampler, EpochsDiffer) {
  auto sampler = sampler_of(Counts(50, 1), 1, 0);
  const auto first = sampler.indices();
  const auto first_rows = sampler.row_order(4, 100);
  EXPECT_EQ(sampler.indices(), first) << "an epoch is the same each time";
  EXPECT_EQ(sampler.row_order(4, 100), first_rows);
  sampler.set_epoch(1);
  EXPECT_NE(sampler.indices(), first);
  EXPECT_NE(sampler.row_order(4, 100), first_rows);
  EXPECT_NE(sampler.row_order(3, 100), sampler.row_order(4, 100)) << "row groups have orders of their own";
}

TEST(RowGroupSampler, RowOrdersArePermutations) {
  const auto sampler = sampler_of({10}, 1, 0);
  for (const int64_t rows : {1, 2, 17, 1000}) {
    auto order = sampler.row_order(0, rows);
    std::sort(order.begin(), order.end());
    Counts all(static_cast<size_t>(rows));
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(order, all);
  }
  EXPECT_THAT(sampler.row_order(0, 0), IsEmpty());
  EXPECT_THAT(sampler_of({10}, 1, 0, false).row_order(0, 10), IsEmpty());
  const RowGroupSampler in_place({10}, {.num_replicas = 1, .rank = 0, .shuffle_rows = false});
  EXPECT_THAT(in_place.row_order(0, 10), IsEmpty());
}

TEST(RowGroupSampler, KnowsRankAndWorldSizeOfTheDefaultGroup) {
  set_world_defaults({.rank = 1, .world_size = 3});
  const RowGroupSampler sampler(Counts{1, 1, 1});
  const RowGroupSampler told(Counts{1, 1, 1}, {.rank = 2});
  clear_world_defaults();
  EXPECT_EQ(sampler.rank(), 1);
  EXPECT_EQ(sampler.num_replicas(), 3);
  EXPECT_EQ(told.rank(), 2);
  EXPECT_EQ(told.num_replicas(), 3);
}

TEST(RowGroupSampler, RefusesWhatItCannotDo) {
  const auto message = [](const RowGroupSamplerOptions& options, Counts counts = {1}) {
    return testing::message_of<c10::ValueError>([&] { RowGroupSampler(std::move(counts), options); });
  };
  EXPECT_THAT(message({}), HasSubstr("call lockstep::init_process_group() first"));
  EXPECT_THAT(message({.num_replicas = 2, .rank = 2}), HasSubstr("Invalid rank 2"));
  EXPECT_THAT(message({.num_replicas = 0, .rank = 0}), HasSubstr("Invalid num_replicas 0"));
  EXPECT_THAT(message({.num_replicas = 1, .rank = 0}, {3, -1}), HasSubstr("row group 1 has -1 rows"));
}

}  // namespace
}  // namespace lockstep::data::row_group_sampler_test
