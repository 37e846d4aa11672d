#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <lockstep/base/rethrow_with_context.h>

namespace lockstep::pipeline::internal {

/// A partition's work on one micro-batch.
struct PipeCellId {
  size_t micro_batch;
  size_t partition;
};

/// What the partitions' threads give each other: one value for each cell, put by one thread and taken by
/// another. When a cell has failed, threads that wait go on without a value. Thread-safe.
template <class T>
class PipeMailboxes {
 public:
  PipeMailboxes(size_t micro_batches, size_t partitions)
      : partitions_(partitions), boxes_(micro_batches * partitions) {}

  void put(PipeCellId cell, T value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    box(cell) = std::move(value);
    changed_.notify_all();
  }

  /// Waits for the value. None when a cell has failed.
  std::optional<T> take(PipeCellId cell) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return failure_ != nullptr || box(cell).has_value(); });
    if (failure_ != nullptr) return std::nullopt;
    return std::exchange(box(cell), std::nullopt);
  }

  /// The cell has thrown the current exception.
  void fail(PipeCellId cell) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t index = cell.micro_batch * partitions_ + cell.partition;
    if (failure_ != nullptr && failed_ < index) return;
    failure_ = std::current_exception();
    failed_ = index;
    changed_.notify_all();
  }

  /// Throws what a cell has thrown, that of the first micro-batch if several have, with where(cell) added to
  /// it. To be called when all threads are done.
  template <class Where>
  void throw_failure(const Where& where) {
    if (failure_ == nullptr) return;
    try {
      std::rethrow_exception(std::exchange(failure_, nullptr));
    } catch (...) {
      rethrow_with_context(where(PipeCellId{failed_ / partitions_, failed_ % partitions_}));
    }
  }

 private:
  std::optional<T>& box(PipeCellId cell) { return boxes_[cell.micro_batch * partitions_ + cell.partition]; }

  const size_t partitions_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<std::optional<T>> boxes_;
  std::exception_ptr failure_;
  size_t failed_ = 0;
};

}  // namespace lockstep::pipeline::internal
