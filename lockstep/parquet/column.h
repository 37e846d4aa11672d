#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::data {

/// One column of a Table: its values in N rows, in CPU memory.
///
///     kind      a row is           values                     offsets
///     kNumbers  values[i]          [N], or [N, k] for lists   none
///                                  of the fixed size k
///     kStrings  string(i)          all bytes, uint8           [N + 1] int64, from 0: row i is
///     kLists    list(i)            all elements, [M] or       values[offsets[i]] to
///                                  [M, k]                     values[offsets[i + 1] - 1]
///
/// Copies share the memory. Reading is safe from any number of threads.
struct Column {
  enum class Kind { kNumbers, kStrings, kLists };

  Kind kind = Kind::kNumbers;
  at::Tensor values;
  at::Tensor offsets;
  /// bool [N], false where the row is null; only with Nulls::kMask.
  at::Tensor valid;
  /// bool, of values' shape, false where an element of a list is null; only for lists (of fixed size, too)
  /// with Nulls::kMask.
  at::Tensor element_valid;

  int64_t rows() const;
  /// Bytes of all tensors.
  int64_t nbytes() const;

  /// The string of a row; shares the column's memory. Throws c10::IndexError for a row that is not there, and
  /// c10::TypeError unless the column is one of strings.
  std::string_view string(int64_t row) const;
  /// All strings. Throws as string() does.
  std::vector<std::string> strings() const;
  /// The elements of a row's list; shares the column's memory. Throws c10::IndexError for a row that is not
  /// there, and c10::TypeError unless the column is one of lists.
  at::Tensor list(int64_t row) const;

  /// Rows `begin` to `end` - 1. Shares the memory, but for offsets, which begin at 0 again. Throws
  /// c10::IndexError unless 0 <= begin <= end <= rows().
  Column slice(int64_t begin, int64_t end) const;
  /// These rows, in this order, in memory of their own. Throws c10::IndexError for a row that is not there.
  Column select(std::span<const int64_t> chosen) const;
  /// The same in memory of its own.
  Column clone() const;
  /// The rows of all parts, one after the other, in memory of their own. `parts` are of the same kind,
  /// element type and shape, and have masks all or none; at least one.
  static Column concat(std::span<const Column* const> parts);
};

}  // namespace lockstep::data
