#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

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

int64_t most_part_numel(double cap_mb, int ranks, int64_t element_size) {
  constexpr double kMiB = 1 << 20, kMost = 1e15;  // more than any memory
  const double elements = cap_mb * kMiB / ranks / static_cast<double>(element_size);
  return static_cast<int64_t>(std::clamp(elements, 1.0, kMost));
}

PieceLayout::PieceLayout(std::vector<RowShape> parameters, int ranks, int64_t most_part_numel)
    : parameters_(std::move(parameters)), ranks_(ranks), most_part_numel_(most_part_numel) {
  TORCH_INTERNAL_ASSERT(most_part_numel > 0);
  for (const RowShape& parameter : parameters_) {
    offsets_.push_back(piece_numel_);
    piece_numel_ += most_rows(parameter.rows, ranks_) * parameter.row_numel;
  }
}

size_t PieceLayout::parts() const {
  return static_cast<size_t>(std::max<int64_t>(1, (piece_numel_ + most_part_numel_ - 1) / most_part_numel_));
}

int64_t PieceLayout::part_numel(size_t part) const {
  return std::min(most_part_numel_, piece_numel_ - part_begin(part));
}

PieceLayout::Run PieceLayout::run(size_t index, int rank, size_t part) const {
  const RowShape& parameter = parameters_[index];
  const int64_t begin = std::max(offset(index), part_begin(part));
  const int64_t end = std::min(offset(index) + numel(index, rank), part_begin(part) + part_numel(part));
  if (begin >= end) return {};
  return {.source = rows_of(parameter.rows, rank, ranks_).begin * parameter.row_numel + begin - offset(index),
          .place = rank * part_numel(part) + begin - part_begin(part),
          .numel = end - begin};
}

std::vector<int64_t> aligned_offsets(const std::vector<int64_t>& bytes) {
  std::vector<int64_t> offsets{0};
  for (const int64_t size : bytes) {
    offsets.push_back((offsets.back() + size + kCacheLine - 1) / kCacheLine * kCacheLine);
  }
  return offsets;
}

}  // namespace lockstep::fsdp::internal
