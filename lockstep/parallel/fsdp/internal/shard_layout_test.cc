#include <algorithm>
#include <gmock/gmock.h>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/parallel/fsdp/internal/shard_layout.h>

namespace lockstep::fsdp::internal::shard_layout_test {
namespace {

using ::testing::ElementsAre;

std::vector<int64_t> sizes_of(int64_t rows, int ranks) {
  std::vector<int64_t> sizes;
  for (int rank = 0; rank < ranks; ++rank) sizes.push_back(rows_of(rows, rank, ranks).size());
  return sizes;
}

TEST(ShardLayout, RowsAreCutAsTorchChunkDoes) {
  EXPECT_THAT(sizes_of(10, 4), ElementsAre(3, 3, 3, 1));
  EXPECT_THAT(sizes_of(5, 4), ElementsAre(2, 2, 1, 0));
  EXPECT_THAT(sizes_of(2, 4), ElementsAre(1, 1, 0, 0));
  EXPECT_THAT(sizes_of(0, 2), ElementsAre(0, 0));
  EXPECT_EQ(rows_of(5, 1, 4), (Rows{2, 4}));
  EXPECT_EQ(RowShape::of({7, 3, 2}).row_numel, 6);
  EXPECT_EQ(RowShape::of({}).numel(), 1);
}

TEST(ShardLayout, BlocksBeginOnCacheLines) {
  EXPECT_THAT(aligned_offsets({1, 64, 0, 65}), ElementsAre(0, 64, 128, 128, 256));
}

// Each element of each parameter has one place in the buffer, in the piece of the rank that owns it, and no two share one.
TEST(ShardLayout, EachElementLiesOnceInItsOwnersPiece) {
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 300; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 5);
    std::vector<RowShape> parameters(1 + random() % 5);
    for (auto& shape : parameters) {
      shape = {static_cast<int64_t>(random() % 12), 1 + static_cast<int64_t>(random() % 4)};
    }
    const PieceLayout layout(parameters, ranks);
    std::vector<int> used(static_cast<size_t>(layout.buffer_numel()), 0);
    for (size_t i = 0; i < parameters.size(); ++i) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const int64_t numel = layout.numel(i, rank);
        ASSERT_EQ(layout.source(i, rank), next) << "seed " << seed;
        next += numel;
        for (int64_t element = 0; element < numel; ++element) {
          const int64_t place = layout.offset(i, rank) + element;
          ASSERT_TRUE(place >= rank * layout.piece_numel() && place < (rank + 1) * layout.piece_numel());
          ASSERT_EQ(used[static_cast<size_t>(place)]++, 0) << "seed " << seed;
        }
      }
      ASSERT_EQ(next, parameters[i].numel()) << "seed " << seed;
    }
    ASSERT_EQ(layout.buffer_numel(), layout.piece_numel() * ranks);
  }
}

}  // namespace
}  // namespace lockstep::fsdp::internal::shard_layout_test
