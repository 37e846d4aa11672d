#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>

#include <lockstep/parquet/bytes_in_flight.h>
#include <lockstep/parquet/parquet_dataset.h>
#include <lockstep/parquet/row_group_sampler.h>
#include <lockstep/parquet/table.h>

namespace lockstep::data {

namespace internal {
class BatchCutter;
}  // namespace internal

struct ParquetBatchesOptions {
  /// Rows per batch of this process.
  int64_t batch_size = 1;
  /// This rank's row groups and their order; not owned, must outlive the ParquetBatches. None: all row groups
  /// in their own order.
  RowGroupSampler* sampler = nullptr;
  /// Leave out the last batch when it is smaller than batch_size.
  bool drop_last = false;
  /// With a sampler: all ranks get as many rows as the one with the fewest has in this epoch, so all make the
  /// same number of steps, with batches of the same sizes, as DDP wants it. The others' last rows are left
  /// out.
  bool even_batches = false;
  /// Read row groups ahead in a background thread, or when they are needed.
  bool read_ahead = true;
  /// Bytes of decoded row groups that are in flight at the same time, those read ahead and the one in use. A
  /// row group that alone is larger is read when no other is in flight. Arrow's scratch memory while it
  /// decodes one (a column's compressed bytes, above all) comes on top.
  int64_t memory_limit = int64_t{256} << 20;
};

/// Batches of rows of a ParquetDataset, epoch after epoch, across the borders of row groups and files: an
/// iterable data set, which is its own loader.
///
///     ParquetBatches batches(train, {.batch_size = 64, .sampler = &sampler, .even_batches = true});
///     for (int epoch = 0; epoch < 5; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : batches) step(batch.matrix(features), batch.tensor("label"));
///     }
///
/// Each `for` loop is an epoch; begin() asks the sampler for its order. Leaving the loop early ends the
/// background thread after the row group that it is reading. The same sampler, seed and epoch give the same
/// batches, with and without reading ahead. A batch may share the memory of its row group, all of which stays
/// alive with it: clone() what you keep for long.
///
/// Errors in a row group (see ParquetDataset::get) are thrown where its first rows are asked for, after all
/// batches before it; the epoch is over then.
///
/// Iterators may outlive the ParquetBatches. An epoch under way doesn't survive fork(). Thread-safety: one
/// thread at a time per object and per iterator, but for the counters, which any thread may ask.
class ParquetBatches {
 public:
  /// Copies of the data set share what it opened. Throws c10::ValueError when batch_size or memory_limit are
  /// not positive, or when even_batches is told without a sampler.
  explicit ParquetBatches(ParquetDataset dataset, const ParquetBatchesOptions& options = {});

  /// The current batch and those to come. Move-only; the end is std::default_sentinel.
  class Iterator {
   public:
    using value_type = Table;
    using difference_type = std::ptrdiff_t;
    using iterator_concept = std::input_iterator_tag;

    Iterator(Iterator&&) noexcept;
    Iterator& operator=(Iterator&&) noexcept;
    ~Iterator();

    Table& operator*() const { return *batch_; }
    Table* operator->() const { return &*batch_; }
    Iterator& operator++();
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& iterator, std::default_sentinel_t /*end*/) {
      return !iterator.batch_.has_value();
    }

   private:
    friend class ParquetBatches;
    explicit Iterator(std::unique_ptr<internal::BatchCutter> cutter);

    std::unique_ptr<internal::BatchCutter> cutter_;
    mutable std::optional<Table> batch_;
  };

  /// Starts an epoch and waits for its first batch. Throws c10::ValueError when even_batches leaves a data
  /// set with rows without any batch, because there are fewer row groups than ranks.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

  /// Batches of the epoch that begin() would start now.
  int64_t size() const;

  /// Bytes of row groups in flight, of all epochs under way: now, and the most there ever were.
  int64_t bytes_in_flight() const;
  int64_t peak_bytes_in_flight() const;

 private:
  int64_t rows_of_epoch() const;

  ParquetDataset dataset_;
  ParquetBatchesOptions options_;
  std::shared_ptr<internal::BytesInFlight> bytes_;
};

}  // namespace lockstep::data
