#include <algorithm>
#include <gmock/gmock.h>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include <lockstep/parallel/ddp/reducer/bucket_assignment.h>

namespace lockstep::bucket_assignment_test {
namespace {

using ::testing::ElementsAre;

std::vector<size_t> in_order(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

TEST(BucketAssignment, ClosesABucketOnceItHoldsItsCap) {
  const std::vector<ParameterSize> sizes{{10, 0}, {20, 0}, {100, 0}, {30, 0}, {70, 0}, {1, 0}};
  EXPECT_THAT(assign_buckets(sizes, in_order(6), {25, 100}),
              ElementsAre(ElementsAre(0, 1), ElementsAre(2), ElementsAre(3, 4), ElementsAre(5)));
  EXPECT_THAT(assign_buckets(sizes, {5, 4, 3, 2, 1, 0}, {1, 1000}),
              ElementsAre(ElementsAre(5), ElementsAre(4, 3, 2, 1, 0)));
  EXPECT_TRUE(assign_buckets({}, {}, {1}).empty());
}

TEST(BucketAssignment, KeepsKindsApart) {
  const std::vector<ParameterSize> sizes{{10, 0}, {10, 1}, {10, 0}, {10, 1}};
  EXPECT_THAT(assign_buckets(sizes, in_order(4), {100}), ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3)));
}

TEST(BucketAssignment, TakesAListOfCapsAndLeavesSomeAlone) {
  const std::vector<ParameterSize> sizes{{10, 0}, {10, 0}, {10, 0, true}, {10, 0}, {10, 0}, {10, 0}, {10, 0}};
  EXPECT_THAT(assign_buckets(sizes, in_order(7), {10, 20, 30}),
              ElementsAre(ElementsAre(0), ElementsAre(1, 3), ElementsAre(2), ElementsAre(4, 5, 6)));
}

TEST(BucketAssignment, HoldsItsPropertiesForRandomModels) {
  std::mt19937 random(3);
  for (int repetition = 0; repetition < 300; ++repetition) {
    std::vector<ParameterSize> sizes(random() % 40);
    for (auto& size : sizes) size = {random() % 200, static_cast<int>(random() % 3)};
    auto order = in_order(sizes.size());
    std::shuffle(order.begin(), order.end(), random);
    const size_t first_cap = 1 + random() % 100;
    const size_t cap = first_cap + random() % 300;
    const auto buckets = assign_buckets(sizes, order, {first_cap, cap});
    std::vector<size_t> all;
    for (const auto& bucket : buckets) {
      ASSERT_FALSE(bucket.empty());
      size_t bytes = 0;
      for (size_t index : bucket) {
        ASSERT_EQ(sizes[index].kind, sizes[bucket[0]].kind);
        ASSERT_LT(bytes, cap) << "was full before this parameter";
        bytes += sizes[index].bytes;
      }
      all.insert(all.end(), bucket.begin(), bucket.end());
    }
    std::sort(all.begin(), all.end());
    ASSERT_EQ(all, in_order(sizes.size())) << "each parameter once";
  }
}

}  // namespace
}  // namespace lockstep::bucket_assignment_test
