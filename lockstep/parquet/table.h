#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/parquet/column.h>

namespace lockstep::data {

/// Some rows of a ParquetDataset: a row group, or a batch of rows; one Column for each of its columns.
///
/// Copies share the memory. Reading is safe from any number of threads.
class Table {
 public:
  Table() = default;
  /// `columns` have `rows` rows each, and belong to `names`.
  Table(std::shared_ptr<const std::vector<std::string>> names, std::vector<Column> columns, int64_t rows,
        int64_t row_group = -1);

  int64_t rows() const { return rows_; }
  const std::vector<std::string>& names() const;
  /// Throws c10::ValueError that lists the columns that there are.
  const Column& operator[](const std::string& name) const;
  /// In the order of names().
  const std::vector<Column>& columns() const { return columns_; }

  /// The values of a column of numbers: [N], or [N, k] for lists of a fixed size. Throws as [] does, and
  /// c10::TypeError for strings and lists.
  const at::Tensor& tensor(const std::string& name) const;
  /// Columns of numbers side by side, converted: [N, sum of their widths]. Throws as tensor() does.
  at::Tensor matrix(const std::vector<std::string>& names, at::ScalarType dtype = at::kFloat) const;

  /// The row group that all rows come from, as ParquetDataset numbers them; -1: several.
  int64_t row_group() const { return row_group_; }
  /// Bytes of all tensors.
  int64_t nbytes() const;

  /// See Column's functions of these names.
  Table slice(int64_t begin, int64_t end) const;
  Table select(std::span<const int64_t> rows) const;
  Table clone() const;
  /// Throws c10::ValueError when columns don't match, and when there is no part.
  static Table concat(std::span<const Table> parts);

 private:
  std::shared_ptr<const std::vector<std::string>> names_;
  std::vector<Column> columns_;
  int64_t rows_ = 0;
  int64_t row_group_ = -1;
};

}  // namespace lockstep::data
