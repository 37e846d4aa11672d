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

/// How many elements a rank's piece of a buffer of `cap_mb` MiB, infinity too, has place for; at least one.
int64_t most_part_numel(double cap_mb, int ranks, int64_t element_size);

/// How the gradients of a group of parameters lie in flat buffers, so that reduce-scatters give each rank those of its rows: a
/// piece for each rank, equally large, and in it place for most_rows() of each parameter, one after the other. The pieces are
/// cut into parts, so that a buffer need not have place for more than one part of each.
class PieceLayout {
 public:
  /// Parts of at most `most_part_numel` elements of a piece.
  PieceLayout(std::vector<RowShape> parameters, int ranks, int64_t most_part_numel);

  int64_t piece_numel() const { return piece_numel_; }
  /// At least one, also of pieces without elements.
  size_t parts() const;
  int64_t part_begin(size_t part) const {
    return static_cast<int64_t>(part) * most_part_numel_;
  }                                       ///< in a piece
  int64_t part_numel(size_t part) const;  ///< of a piece
  /// The largest part's of all ranks.
  int64_t buffer_numel() const { return part_numel(0) * ranks_; }

  /// The rows of parameter number `index` begin here in their owner's piece.
  int64_t offset(size_t index) const { return offsets_[index]; }
  /// As many elements of the parameter lie in the piece of `rank`.
  int64_t numel(size_t index, int rank) const {
    return rows_of(parameters_[index].rows, rank, ranks_).size() * parameters_[index].row_numel;
  }

  /// Elements of a parameter that lie one after the other in a buffer, too.
  struct Run {
    int64_t source = 0;  // in the parameter
    int64_t place = 0;   // in the buffer
    int64_t numel = 0;
  };
  /// Those of parameter number `index` that `rank` owns, and that are in this part.
  Run run(size_t index, int rank, size_t part) const;

 private:
  std::vector<RowShape> parameters_;
  int ranks_;
  int64_t most_part_numel_;
  std::vector<int64_t> offsets_;  // within a piece, by parameter
  int64_t piece_numel_ = 0;
};

/// Where blocks of these sizes begin one after the other, each on a cache line, and after the last one the end.
std::vector<int64_t> aligned_offsets(const std::vector<int64_t>& bytes);

}  // namespace lockstep::fsdp::internal
