#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include <lockstep/base/process/bounded_queue.h>
#include <lockstep/base/process/leaked_in_child.h>
#include <lockstep/data/internal/worker_pool.h>

/// The parts of DataLoader that don't depend on the data set's type.
namespace lockstep::data::internal {

/// How a batch comes about. Its type, like that of what is drawn, is known to the DataLoader alone.
struct BatchRecipe {
  /// Map-style: makes a batch from the samples at these indices.
  std::function<std::shared_ptr<void>(std::span<const int64_t> indices)> make;
  /// Iterable, in place of make: takes the next at most `most` records off the stream, and says how many it
  /// has taken. One call at a time, in the order of the batches.
  std::function<std::shared_ptr<void>(int64_t most, int64_t& taken)> draw;
  /// Iterable: makes a batch from what was drawn.
  std::function<std::shared_ptr<void>(std::shared_ptr<void> drawn)> finish;
};

/// What one epoch loads. Does not change once it is made.
struct EpochPlan {
  bool iterable = false;
  std::vector<int64_t> indices = {};  // map-style: of the whole epoch, in order
  std::vector<int64_t> last_of = {};  // with a batch sampler: where in `indices` each batch ends
  int64_t first = 0;                  // samples that were seen before this process resumed the epoch,
  int64_t first_batch = 0;            // and batches
  int64_t batch_size = 1;
  bool drop_last = false;
  int64_t dataset_size = 0;
  int64_t base_seed = 0;

  struct Slice {
    int64_t begin = 0;
    int64_t end = 0;
  };
  /// Where in `indices` a batch lies, counted from the epoch's first; nothing of it: the epoch is over.
  Slice slice(int64_t batch) const;
};

/// Where a loader's latest epoch stands. EpochPlanner makes an epoch loaded or under way;
/// BatchPipeline::next() ends one that is under way.
enum class EpochPhase : uint8_t {
  kNone,            // no epoch has begun
  kLoaded,          // from a state, and waits for start_epoch()
  kLoadedFinished,  // from a state, in which it had ended
  kUnderWay,        // gives batches
  kFailed,          // gives no more, after an error of the stream or of worker_init_fn; it had no end
  kFinished,        // its end was reached
};

/// How far an epoch has come; while it is under way, written by the thread that iterates.
struct EpochProgress {
  EpochPhase phase = EpochPhase::kNone;
  int64_t batches = 0;  // that were handed out, those before a resume included
  int64_t samples = 0;
};

/// How an epoch is run.
struct BatchPipelineOptions {
  int64_t prefetch_factor = 2;          // batches that a worker may have ready or in the making
  std::chrono::nanoseconds timeout{0};  // 0: none
  std::function<void(int)> worker_init_fn = {};
};

/// The batches of one epoch, in order.
///
/// Without a pool next() makes them. With one, worker w of N makes batches w, w + N, w + 2N, … and lays them
/// into a queue of its own, its lane; next() takes from lane b mod N. So the order does not depend on N, what
/// a worker draws from its generator depends on N alone, and there is never more than one thread that waits
/// for a lane: its worker for room, or the consumer for a batch.
///
/// What is drawn from a stream is drawn by one worker after the other, in the order of the batches, each
/// waiting for its turn; the rest of the work on a batch goes on beside it.
///
/// next() and the destructor belong to one thread. Memory ordering: a batch is written by its worker before
/// it is pushed into the lane, and read by the consumer after it was popped. A stream is handed from one
/// worker to the next through turn_mutex_. The plan, the recipe and all else that workers read is written
/// before WorkerPool::start(), and they have returned from run() when end() returns. A mutex is held only to
/// look at and change a lane or the turn, never while a batch is made. waited_ is a counter, read and written
/// relaxed: no other data depends on it.
class BatchPipeline {
 public:
  /// No pool: no background threads. `progress` is under way.
  BatchPipeline(std::shared_ptr<const EpochPlan> plan, BatchRecipe recipe, BatchPipelineOptions options,
                std::shared_ptr<EpochProgress> progress, std::shared_ptr<std::atomic<int64_t>> waited,
                std::shared_ptr<WorkerPool> pool);
  /// Stops the workers; waits for the batches that they are making.
  ~BatchPipeline();
  BatchPipeline(const BatchPipeline&) = delete;
  BatchPipeline& operator=(const BatchPipeline&) = delete;

  /// The next batch, or nothing after the last. Rethrows what went wrong when that batch was made; the next
  /// call gives the batch after it, and only then does progress count the failed one. After a timeout the
  /// next call waits for the same batch again. The epoch is over after an error of the stream itself, as
  /// with a generator in Python, and after one of worker_init_fn.
  std::shared_ptr<void> next();

 private:
  struct Outcome {
    std::shared_ptr<void> batch = {};
    int64_t samples = 0;              // of the batch, also if it could not be made; 0: the epoch is over
    std::exception_ptr failure = {};  // in place of a batch, or of the epoch's end
  };
  using Lane = BoundedQueue<Outcome>;

  void run(Worker& worker);
  void stop();
  Outcome make(int64_t batch) noexcept;
  void make_from_indices(int64_t batch, Outcome& outcome);
  void make_from_stream(int64_t batch, Outcome& outcome);
  Outcome take(Lane& lane);
  void pass(int64_t samples);

  const std::shared_ptr<const EpochPlan> plan_;
  const BatchRecipe recipe_;
  const BatchPipelineOptions options_;
  const std::shared_ptr<EpochProgress> progress_;
  const std::shared_ptr<std::atomic<int64_t>> waited_;  // nanoseconds
  const std::shared_ptr<WorkerPool> pool_;

  int64_t next_batch_;          // next()'s own
  int64_t failed_samples_ = 0;  // next()'s own: of the batch that it has thrown for; 0: it has not
  std::deque<Lane> lanes_;
  int64_t job_ = 0;

  std::mutex turn_mutex_;
  LeakedInChild<std::condition_variable> turn_changed_;
  int64_t turn_ = 0;         // the batch whose worker may draw; guarded by turn_mutex_, as all below
  int64_t drawn_ = 0;        // samples of the epoch that were drawn
  bool turns_over_ = false;  // no thread shall draw any more: stop() was called, or the stream is at its end
};

}  // namespace lockstep::data::internal
