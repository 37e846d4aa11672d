#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <c10/core/ScalarType.h>

#include <lockstep/bench/internal/plan.h>

namespace lockstep::bench::internal {

/// Values of a buffer by index, repeated with a period: filling and comparing are copies and memory compares
/// of one block. The period is a prime, so that a part which lands at the wrong place is seen wherever the
/// parts begin. Immutable.
class Pattern {
 public:
  static constexpr int64_t kPeriod = 4093;

  /// `value` of each index below `length`, rounded to the type once. `tolerance` is relative: 0 means the
  /// same number.
  Pattern(c10::ScalarType type, int64_t length, const std::function<double(int64_t index)>& value,
          double tolerance = 0);

  /// Writes the values of the indices first, first + 1, … into `elements` elements.
  void fill(void* data, int64_t elements, int64_t first = 0) const;
  /// How many of them differ in `data`.
  int64_t count_wrong(const void* data, int64_t elements, int64_t first = 0) const;

 private:
  /// Calls visit(offset into data, part of the block, bytes) for each run up to the block's end.
  template <class Visit>
  void for_each_run(int64_t elements, int64_t first, Visit visit) const;

  c10::ScalarType type_;
  double tolerance_;
  int64_t element_bytes_;
  std::vector<char> block_;
};

/// What every rank puts into each iteration, and what comes out. Small whole numbers, so that every type
/// holds them, and their sums and products, exactly. A value; its methods are pure functions.
class Contributions {
 public:
  /// `op`: nothing for collectives that only move data. `length`: elements of the largest buffer.
  Contributions(c10::ScalarType type, std::optional<RedOpType> op, int ranks, int64_t length);

  /// The contribution of one rank.
  Pattern of(int rank, int64_t iteration) const;
  /// The reduction of all of them.
  Pattern reduced(int64_t iteration) const;

 private:
  int64_t value(int rank, int64_t iteration, int64_t index) const;
  double reduced_value(int64_t iteration, int64_t index) const;

  c10::ScalarType type_;
  std::optional<RedOpType> op_;
  int ranks_;
  int64_t length_;
};

}  // namespace lockstep::bench::internal
