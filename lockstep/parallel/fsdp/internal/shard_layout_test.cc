#include <gmock/gmock.h>
#include <limits>
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

TEST(ShardLayout, PartsHaveAtLeastOneElementAndAnyCap) {
  EXPECT_EQ(most_part_numel(8, 2, 4), 1 << 20);
  EXPECT_EQ(most_part_numel(1e-9, 2, 4), 1);
  for (const double cap : {1e300, std::numeric_limits<double>::infinity()}) {
    const PieceLayout layout({{.rows = 100, .row_numel = 3}}, 2, most_part_numel(cap, 2, 4));
    EXPECT_EQ(layout.parts(), 1U) << cap;
    EXPECT_EQ(layout.buffer_numel(), 300) << cap;
  }
}

// Each element of each parameter lies in one part, there in the piece of the rank that owns it, and no two share a place.
TEST(ShardLayout, EachElementLiesOnceInItsOwnersPiece) {
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 300; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 5);
    std::vector<RowShape> parameters(1 + random() % 5);
    for (auto& shape : parameters) {
      shape = {static_cast<int64_t>(random() % 12), 1 + static_cast<int64_t>(random() % 4)};
    }
    const PieceLayout layout(parameters, ranks, 1 + static_cast<int64_t>(random() % 40));
    std::vector<std::vector<int>> seen;  // by parameter, element
    for (const RowShape& shape : parameters) seen.emplace_back(static_cast<size_t>(shape.numel()), 0);
    int64_t parts_end = 0;
    for (size_t part = 0; part < layout.parts(); ++part) {
      ASSERT_EQ(layout.part_begin(part), parts_end) << "seed " << seed;
      parts_end += layout.part_numel(part);
      ASSERT_LE(layout.part_numel(part) * ranks, layout.buffer_numel()) << "seed " << seed;
      std::vector<int> used(static_cast<size_t>(layout.part_numel(part) * ranks), 0);
      for (size_t i = 0; i < parameters.size(); ++i) {
        for (int rank = 0; rank < ranks; ++rank) {
          const auto run = layout.run(i, rank, part);
          const Rows rows = rows_of(parameters[i].rows, rank, ranks);
          for (int64_t element = 0; element < run.numel; ++element) {
            const int64_t source = run.source + element, place = run.place + element;
            ASSERT_EQ(seen[i][static_cast<size_t>(source)]++, 0) << "seed " << seed;
            const int64_t row = source / parameters[i].row_numel;
            ASSERT_TRUE(rows.begin <= row && row < rows.end) << "seed " << seed;
            ASSERT_EQ(place / layout.part_numel(part), rank) << "seed " << seed;
            ASSERT_EQ(used[static_cast<size_t>(place)]++, 0) << "seed " << seed;
            // Where the average comes to lie in the owner's piece.
            const int64_t in_piece = layout.part_begin(part) + place % layout.part_numel(part);
            ASSERT_EQ(in_piece, layout.offset(i) + source - rows.begin * parameters[i].row_numel)
                << "seed " << seed;
          }
        }
      }
    }
    ASSERT_EQ(parts_end, layout.piece_numel()) << "seed " << seed;
    for (const auto& elements : seen) ASSERT_THAT(elements, ::testing::Each(1)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace lockstep::fsdp::internal::shard_layout_test
