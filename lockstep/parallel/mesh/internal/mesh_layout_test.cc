#include <algorithm>
#include <gmock/gmock.h>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include <lockstep/parallel/mesh/internal/mesh_layout.h>

namespace lockstep::mesh::internal::mesh_layout_test {
namespace {

using ::testing::ElementsAre;

TEST(MeshLayout, AxesOfARowMajorMesh) {
  const auto axes = row_major({2, 3, 4});
  EXPECT_THAT(axes[0].indices(), ElementsAre(0, 12));
  EXPECT_THAT(axes[1].indices(), ElementsAre(0, 4, 8));
  EXPECT_THAT(axes[2].indices(), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(origins(axes[2], 24), ElementsAre(0, 4, 8, 12, 16, 20));
  EXPECT_THAT(origins(axes[0], 24), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11));
}

TEST(MeshLayout, NeighboursBecomeOneLoopAndOthersDoNot) {
  const auto axes = row_major({2, 1, 3, 4});
  EXPECT_EQ(joined(axes), Axis({{24, 1}}));
  EXPECT_EQ(joined({axes[2], axes[3]}), Axis({{12, 1}}));
  EXPECT_THAT(joined({axes[0], axes[3]}).indices(), ElementsAre(0, 1, 2, 3, 12, 13, 14, 15));
  EXPECT_THAT(joined({axes[3], axes[0]}).indices(), ElementsAre(0, 12, 1, 13, 2, 14, 3, 15));
  EXPECT_TRUE(has_descending_strides(joined({axes[0], axes[3]})));
  EXPECT_FALSE(has_descending_strides(joined({axes[3], axes[0]})));
}

TEST(MeshLayout, OverlapsAreFound) {
  const auto axes = row_major({2, 2, 2});
  EXPECT_TRUE(is_injective(joined({axes[2], axes[0]})));
  EXPECT_FALSE(is_injective(joined({axes[0], joined({axes[0], axes[1]})})));
  EXPECT_FALSE(is_injective(joined({axes[1], axes[1]})));
}

// Whatever dimensions are chosen: the copies of their axis cover all indices, none twice.
TEST(MeshLayout, OriginsAndIndicesMakeEachIndexOnce) {
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> sizes(1 + random() % 4);
    int64_t total = 1;
    for (auto& size : sizes) total *= size = 1 + static_cast<int64_t>(random() % 4);
    auto axes = row_major(sizes);
    std::shuffle(axes.begin(), axes.end(), random);
    axes.erase(axes.begin() + static_cast<int64_t>(random() % (axes.size() + 1)), axes.end());
    const Axis axis = joined(axes);
    std::vector<int64_t> all;
    const auto begins = origins(axis, total);
    EXPECT_TRUE(std::is_sorted(begins.begin(), begins.end()));
    for (const int64_t begin : begins) {
      for (const int64_t index : axis.indices()) all.push_back(begin + index);
    }
    std::sort(all.begin(), all.end());
    std::vector<int64_t> expected(static_cast<size_t>(total));
    std::iota(expected.begin(), expected.end(), 0);
    ASSERT_EQ(all, expected) << "seed " << seed << ", round " << round;
    EXPECT_EQ(axis.size(), static_cast<int64_t>(axis.indices().size()));
  }
}

}  // namespace
}  // namespace lockstep::mesh::internal::mesh_layout_test
