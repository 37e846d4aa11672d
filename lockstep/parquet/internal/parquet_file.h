#pragma once

#include <arrow/type_fwd.h>
#include <cstdint>
#include <memory>
#include <parquet/type_fwd.h>
#include <string>
#include <vector>

namespace lockstep::parquet::internal {

/// One Parquet file: what its footer says, and its row groups. Holds no descriptor: a folder may have more
/// files than a process may open, and a read of a row group is long compared to opening its file.
///
/// Immutable: any number of threads may read. Errors are c10::Error that name the file.
class ParquetFile {
 public:
  /// Reads the footer. Throws when the file is not there, is none of Parquet's, is damaged, or encrypted.
  explicit ParquetFile(std::string path);

  const std::string& path() const { return path_; }
  /// The columns at the top, with Arrow's types.
  const arrow::Schema& schema() const { return *schema_; }
  int row_groups() const;
  int64_t rows(int row_group) const;
  /// What a column at the top has: bytes of strings, and elements of lists, nulls among them.
  /// From the footer: an upper bound for elements; for strings exact where the writer noted it, else what the
  /// encoded ones take.
  struct ColumnContent {
    int64_t string_bytes = 0;
    int64_t elements = 0;
  };
  ColumnContent content(int row_group, int column) const;

  /// These columns, numbers in schema(), of a row group.
  std::vector<std::shared_ptr<arrow::ChunkedArray>> read(int row_group, const std::vector<int>& columns,
                                                         bool use_threads) const;

 private:
  std::string path_;
  int64_t size_ = 0;  // bytes
  std::shared_ptr<::parquet::FileMetaData> metadata_;
  std::shared_ptr<arrow::Schema> schema_;
  std::vector<std::vector<int>> leaves_;  // of each column: Parquet's columns that it consists of
};

}  // namespace lockstep::parquet::internal
