#include <algorithm>
#include <utility>

#include <lockstep/parallel/fsdp/internal/shard_layout.h>

namespace lockstep::fsdp::internal {
namespace {

constexpr int64_t kCacheLine = 64;

}  // namespace

int64_t most_rows(int64_t rows, int ranks) {
  return (rows + ranks - 1) / ranks;
}

Rows rows_of(int64_t rows, int rank, int ranks) {
  const int64_t most = most_rows(rows, ranks);
  return {std::min(rank * most, rows), std::min((rank + 1) * most, rows)};
}

RowShape RowShape::of(const std::vector<int64_t>& sizes) {
  RowShape shape;
  if (!sizes.empty()) shape.rows = sizes[0];
  for (size_t i = 1; i < sizes.size(); ++i) shape.row_numel *= sizes[i];
  return shape;
}

PieceLayout::PieceLayout(std::vector<RowShape> parameters, int ranks)
    : parameters_(std::move(parameters)), ranks_(ranks) {
  for (const RowShape& parameter : parameters_) {
    offsets_.push_back(piece_numel_);
    piece_numel_ += most_rows(parameter.rows, ranks_) * parameter.row_numel;
  }
}

std::vector<int64_t> aligned_offsets(const std::vector<int64_t>& bytes) {
  std::vector<int64_t> offsets{0};
  for (const int64_t size : bytes) {
    offsets.push_back((offsets.back() + size + kCacheLine - 1) / kCacheLine * kCacheLine);
  }
  return offsets;
}

}  // namespace lockstep::fsdp::internal
