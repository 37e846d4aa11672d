#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

/// The parts of DataLoader that don't depend on the data set's type.
namespace lockstep::data::internal {

/// Makes a batch, of a type that only the DataLoader knows, from the samples at these indices.
using MakeBatch = std::function<std::shared_ptr<void>(std::span<const int64_t> indices)>;

/// The batches of one epoch, in order, made in the calling thread or ahead of it in a background thread.
///
/// next() and the destructor belong to one thread. The background thread holds mutex_ only to look at and
/// change the queue, never while it makes a batch.
class BatchPipeline {
 public:
  struct Plan {
    std::vector<int64_t> indices;
    int64_t batch_size = 1;
    bool drop_last = false;
    int64_t dataset_size = 0;
    int64_t ahead =
        0;  // how many batches may be ready or in the making before they are asked for; 0: no thread
  };

  BatchPipeline(Plan plan, MakeBatch make_batch);
  /// Stops and joins the thread; waits for the batch that it is making.
  ~BatchPipeline();
  BatchPipeline(const BatchPipeline&) = delete;
  BatchPipeline& operator=(const BatchPipeline&) = delete;

  /// The next batch, or nothing after the last. Rethrows what went wrong when that batch was made; afterwards
  /// the epoch is over.
  std::shared_ptr<void> next();

 private:
  struct Outcome {
    std::shared_ptr<void> batch;  // none, and no failure either: the epoch is over
    std::exception_ptr failure;
  };

  Outcome make_next() noexcept;
  void run();

  const Plan plan_;
  const MakeBatch make_batch_;
  // Where make_next() is; touched by the thread that makes the batches.
  int64_t position_ = 0;
  int64_t batches_made_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Outcome> ready_;  // guarded by mutex_
  bool stop_ = false;          // guarded by mutex_
  bool over_ = false;          // next()'s own
  std::thread thread_;
};

}  // namespace lockstep::data::internal
