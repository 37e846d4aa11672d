#pragma once

#include <cstdint>
#include <vector>

#include <lockstep/parquet/row_group_sampler.h>
#include <lockstep/parquet/table.h>

namespace lockstep::data {

struct RowGroupCollateOptions {
  /// Rows per batch.
  int64_t batch_size = 1;
  /// Leave out the last batch of the row groups when it is smaller.
  bool drop_last = false;
  /// Shuffles the rows of all row groups together, in the epoch's order; not owned, must outlive the loader.
  /// None: the rows' own order.
  const RowGroupSampler* sampler = nullptr;
};

/// A collate function for a DataLoader over a ParquetDataset: from the row groups of one of the loader's
/// batches to batches of rows. Several row groups at a time mix their rows.
///
///     DataLoader loader(train, {.batch_size = 4, .sampler = &sampler, .num_workers = 1},  // 4 row groups
///                       RowGroupCollate({.batch_size = 64, .sampler = &sampler}));
///     for (auto& batches : loader)
///       for (auto& batch : batches) step(batch.matrix(features), batch.tensor("label"));
///
/// Batches don't span what the loader takes at a time; ParquetBatches' do, and it keeps to a memory limit.
/// Thread-safe while the sampler's epoch stays the same.
class RowGroupCollate {
 public:
  /// Throws c10::ValueError when batch_size is not positive.
  explicit RowGroupCollate(const RowGroupCollateOptions& options);
  /// Batches that share one memory.
  std::vector<Table> operator()(const std::vector<Table>& row_groups) const;

 private:
  RowGroupCollateOptions options_;
};

}  // namespace lockstep::data
