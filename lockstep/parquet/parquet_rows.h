#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include <lockstep/parquet/parquet_dataset.h>
#include <lockstep/parquet/table.h>

namespace lockstep::data {

struct ParquetRowsOptions {
  /// Bytes of decoded row groups to keep, those used last.
  int64_t memory_limit = int64_t{256} << 20;
};

/// The rows of a ParquetDataset as a data set for DataLoader, with any sampler: for data that fit into
/// memory_limit, or that are visited in order. Each row group that is not in memory must be decoded whole for
/// a single row; for large data visited at random, RowGroupSampler and ParquetBatches are the way.
///
///     ParquetRows rows(ParquetDataset("iris.parquet"));
///     DistributedSampler sampler(rows.size());
///     DataLoader loader(rows, {.batch_size = 64, .sampler = &sampler});      // batches are of type Table
///
/// Thread-safe. Copies share the row groups in memory.
class ParquetRows {
 public:
  /// Throws c10::ValueError when memory_limit is negative.
  explicit ParquetRows(ParquetDataset dataset, const ParquetRowsOptions& options = {});

  int64_t size() const;
  /// A table of one row, or of these rows in this order, in memory of their own. Throw c10::IndexError for a
  /// row outside of [0, size()), and what ParquetDataset::get throws.
  Table get(int64_t row) const;
  Table get_batch(std::span<const int64_t> rows) const;

  /// Bytes of the row groups that are kept at this moment.
  int64_t cached_bytes() const;

 private:
  class Cache;
  std::shared_ptr<Cache> cache_;
};

}  // namespace lockstep::data
