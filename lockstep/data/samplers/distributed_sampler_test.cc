// That the indices are Python's is tested by distributed_sampler_test.py; here stands what needs no Python.
#include <algorithm>
#include <numeric>
#include <random>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/world_defaults.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::data::distributed_sampler_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;

TEST(DistributedSampler, PadsOrDrops) {
  EXPECT_THAT(DistributedSampler(5, 2, 1, false).indices(), ElementsAre(1, 3, 0));
  EXPECT_THAT(DistributedSampler(5, 2, 1, false, 0, true).indices(), ElementsAre(1, 3));
  EXPECT_THAT(DistributedSampler(2, 5, 4, false).indices(), ElementsAre(0));  // 0 1 0 1 0
  EXPECT_THAT(DistributedSampler(2, 5, 4, false, 0, true).indices(), IsEmpty());
  EXPECT_THAT(DistributedSampler(0, 3, 1).indices(), IsEmpty());
}

TEST(DistributedSampler, RanksTogetherCoverTheDataSetEvenly) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 100; ++trial) {
    const int64_t size = static_cast<int64_t>(random() % 500);
    const int64_t ranks = 1 + static_cast<int64_t>(random() % 12);
    const bool drop_last = random() % 2 == 0;
    std::vector<int64_t> seen(static_cast<size_t>(size));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      DistributedSampler sampler(size, ranks, rank, true, trial, drop_last);
      EXPECT_EQ(sampler.total_size(), sampler.size() * ranks);
      const auto indices = sampler.indices();
      EXPECT_EQ(static_cast<int64_t>(indices.size()), sampler.size());
      for (const int64_t index : indices) ++seen.at(static_cast<size_t>(index));
    }
    if (size == 0) continue;
    const auto [least, most] = std::minmax_element(seen.begin(), seen.end());
    EXPECT_LE(*most - *least, 1) << size << " samples, " << ranks << " ranks";
    const int64_t visits = std::accumulate(seen.begin(), seen.end(), int64_t{0});
    EXPECT_EQ(visits, drop_last ? size / ranks * ranks : (size + ranks - 1) / ranks * ranks);
  }
}

TEST(DistributedSampler, EpochChangesTheOrderAndOnlyTheEpoch) {
  DistributedSampler sampler(1000, 2, 0);
  const auto first = sampler.indices();
  EXPECT_EQ(sampler.indices(), first);
  sampler.set_epoch(1);
  EXPECT_NE(sampler.indices(), first);
  EXPECT_EQ(sampler.indices(), DistributedSampler(1000, 2, 0, true, 1).indices()) << "seed + epoch";
  sampler.set_epoch(0);
  EXPECT_EQ(sampler.indices(), first);
}

TEST(DistributedSampler, TakesWhatIsNotToldFromTheDefaultGroup) {
  clear_world_defaults();
  EXPECT_THAT(message_of<c10::ValueError>([] { DistributedSampler(10); }), HasSubstr("init_process_group"));
  EXPECT_THAT(message_of<c10::ValueError>([] { DistributedSampler(10, {.rank = 0}); }),
              HasSubstr("init_process_group"));
  set_world_defaults({.rank = 2, .world_size = 3});
  const DistributedSampler sampler(10);
  EXPECT_EQ(sampler.rank(), 2);
  EXPECT_EQ(sampler.num_replicas(), 3);
  EXPECT_EQ(DistributedSampler(10, {.rank = 0}).num_replicas(), 3);
  EXPECT_EQ(message_of<c10::ValueError>([] { DistributedSampler(10, {.num_replicas = 2}); }),
            "Invalid rank 2, rank should be in the interval [0, 1]");
  clear_world_defaults();
  EXPECT_THAT(message_of<c10::ValueError>([] { DistributedSampler(10); }), HasSubstr("init_process_group"));
  EXPECT_EQ(sampler.rank(), 2) << "a sampler outlives the group";
}

TEST(DistributedSampler, RefusesWhatMakesNoSense) {
  EXPECT_THAT(message_of<c10::ValueError>([] { DistributedSampler(-1, 2, 0); }), HasSubstr("size is -1"));
  EXPECT_THAT(message_of<c10::ValueError>([] { DistributedSampler(1, 0, 0); }),
              HasSubstr("Invalid num_replicas 0"));
  EXPECT_EQ(message_of<c10::ValueError>([] { DistributedSampler(1, 2, -1); }),
            "Invalid rank -1, rank should be in the interval [0, 1]");
  EXPECT_THAT(message_of<c10::ValueError>([] { SequentialSampler(-2); }), HasSubstr("size is -2"));
  EXPECT_THAT(message_of<c10::ValueError>([] { RandomSampler(-2); }), HasSubstr("size is -2"));
}

TEST(WorldDefaults, AreBothOrNone) {
  clear_world_defaults();
  EXPECT_FALSE(world_defaults().has_value());
  set_world_defaults({.rank = 0, .world_size = 1});
  EXPECT_EQ(world_defaults()->world_size, 1);
  EXPECT_THROW(set_world_defaults({.rank = 1, .world_size = 1}), c10::ValueError);
  EXPECT_THROW(set_world_defaults({.rank = -1, .world_size = 1}), c10::ValueError);
  EXPECT_EQ(world_defaults()->rank, 0) << "a refused value changes nothing";
  clear_world_defaults();
  EXPECT_FALSE(world_defaults().has_value());
}

TEST(RandomSampler, PermutesAnewEachEpoch) {
  RandomSampler sampler(100);
  auto first = sampler.indices();
  auto second = sampler.indices();
  EXPECT_NE(first, second);
  std::sort(first.begin(), first.end());
  EXPECT_EQ(first, SequentialSampler(100).indices());
  EXPECT_THAT(RandomSampler(0).indices(), IsEmpty());
}

}  // namespace
}  // namespace lockstep::data::distributed_sampler_test
