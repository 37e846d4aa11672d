#pragma once

#include <cstdint>
#include <vector>

/// Which rank owns which rows of a parameter, and where the rows of several parameters lie in one piece. Pure functions.
namespace lockstep::fsdp::internal {

/// Rows [begin, end) of a parameter: places in its first dimension.
struct Rows {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Rows&) const = default;
};

/// What `rank` owns of `rows`, as torch.chunk() and fully_shard cut them: all ranks have equally many but the last ones,
/// which have fewer or none.
Rows rows_of(int64_t rows, int rank, int ranks);
/// The most that a rank owns.
int64_t most_rows(int64_t rows, int ranks);

/// One parameter as rows: {7, 3, 2} is 7 rows of 6 elements, a number is one row of one.
struct RowShape {
  int64_t rows = 1;
  int64_t row_numel = 1;
  static RowShape of(const std::vector<int64_t>& sizes);
  int64_t numel() const { return rows * row_numel; }
};

/// How the gradients of a group of parameters lie in a flat buffer, so that one reduce-scatter gives each rank those of
/// its rows: a piece for each rank, equally large, and in it place for most_rows() of each parameter, one after the other.
class PieceLayout {
 public:
  PieceLayout(std::vector<RowShape> parameters, int ranks);

  int64_t piece_numel() const { return piece_numel_; }
  int64_t buffer_numel() const { return piece_numel_ * ranks_; }

  /// The rows of parameter number `index` that `rank` owns begin here, in elements from the buffer's begin.
  int64_t offset(size_t index, int rank) const { return rank * piece_numel_ + offsets_[index]; }
  /// As many elements of the parameter lie there.
  int64_t numel(size_t index, int rank) const {
    return rows_of(parameters_[index].rows, rank, ranks_).size() * parameters_[index].row_numel;
  }
  /// In the parameter they begin here, in elements.
  int64_t source(size_t index, int rank) const {
    return rows_of(parameters_[index].rows, rank, ranks_).begin * parameters_[index].row_numel;
  }

 private:
  std::vector<RowShape> parameters_;
  int ranks_;
  std::vector<int64_t> offsets_;  // within a piece, by parameter
  int64_t piece_numel_ = 0;
};

/// Where blocks of these sizes begin one after the other, each on a cache line, and behind the last one the end.
std::vector<int64_t> aligned_offsets(const std::vector<int64_t>& bytes);

}  // namespace lockstep::fsdp::internal
