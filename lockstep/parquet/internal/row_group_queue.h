#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/bounded_queue.h>
#include <lockstep/base/process/fork_guard.h>
#include <lockstep/parquet/bytes_in_flight.h>
#include <lockstep/parquet/parquet_dataset.h>
#include <lockstep/parquet/table.h>

namespace lockstep::parquet::internal {

using data::ParquetDataset;
using data::Table;
using data::internal::BytesInFlight;

/// Row groups in a given order, read ahead in a background thread as long as those in flight stay within the
/// limit, or when they are asked for.
///
/// In flight is a row group from just before it is read (with the bytes that its file lets expect, then those
/// that it has) until release(). One that is larger than the limit is read when no other is in flight. So
/// next() must not be called while an earlier one is still held.
///
/// next(), release() and the destructor belong to one thread.
class RowGroupQueue {
 public:
  RowGroupQueue(ParquetDataset dataset, std::vector<int64_t> order, int64_t memory_limit, bool background,
                std::shared_ptr<BytesInFlight> bytes);
  /// Waits for the row group that is being read; not in a forked child, which has no such thread.
  ~RowGroupQueue();
  RowGroupQueue(const RowGroupQueue&) = delete;
  RowGroupQueue& operator=(const RowGroupQueue&) = delete;

  /// The next row group, or nothing after the last. Rethrows what went wrong when it was read.
  std::optional<Table> next();
  /// The row group that next() gave last is used up.
  void release();

 private:
  struct Outcome {
    std::optional<Table> table;
    int64_t bytes = 0;
    std::exception_ptr failure;
  };

  /// Reads a row group, for which room of `expected` bytes was reserved, and lays it, or why it can't be read, into the queue.
  /// False: it can't be read.
  bool read(int64_t row_group, int64_t expected);
  int64_t expect(int64_t row_group) const noexcept;
  void run();

  const ParquetDataset dataset_;
  const std::vector<int64_t> order_;
  const std::shared_ptr<BytesInFlight> counter_;  // of all epochs, to look at
  size_t position_ = 0;                           // without a thread
  int64_t held_ = 0;                              // bytes of what next() gave

  BoundedQueue<Outcome> queue_;  // by bytes
  ForkGuard fork_guard_;
  BackgroundThread thread_;
};

}  // namespace lockstep::parquet::internal
