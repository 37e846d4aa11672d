#include <utility>

#include <ATen/record_function.h>

#include <lockstep/parquet/internal/row_group_queue.h>

namespace lockstep::parquet::internal {

RowGroupQueue::RowGroupQueue(ParquetDataset dataset, std::vector<int64_t> order, int64_t memory_limit,
                             bool background, std::shared_ptr<BytesInFlight> bytes)
    : dataset_(std::move(dataset)),
      order_(std::move(order)),
      counter_(std::move(bytes)),
      queue_(memory_limit) {
  if (background) thread_.start("lockstep-rows", [this] { run(); });
}

RowGroupQueue::~RowGroupQueue() {
  if (fork_guard_.in_forked_child()) return;
  queue_.stop();
  thread_.join();
  counter_->add(-queue_.in_use());
}

bool RowGroupQueue::read(int64_t row_group, int64_t expected) {
  RECORD_USER_SCOPE("Parquet: read a row group");
  Outcome outcome;
  try {
    outcome.table = dataset_.get(row_group);
    outcome.bytes = outcome.table->nbytes();
  } catch (...) {
    outcome.failure = std::current_exception();
  }
  const int64_t more = outcome.bytes - expected;
  const bool succeeded = outcome.failure == nullptr;
  counter_->add(more);
  queue_.push(std::move(outcome), more);
  return succeeded;
}

int64_t RowGroupQueue::expect(int64_t row_group) const noexcept {
  try {
    return dataset_.expected_bytes(row_group);
  } catch (...) {
    return 0;  // reading it will say what is wrong with it
  }
}

void RowGroupQueue::run() {
  for (const int64_t row_group : order_) {
    const int64_t expected = expect(row_group);
    {
      RECORD_USER_SCOPE("Parquet: wait for room");
      if (!queue_.reserve(expected)) return;
    }
    counter_->add(expected);
    if (!read(row_group, expected)) return;
  }
}

std::optional<Table> RowGroupQueue::next() {
  if (position_ == order_.size()) return std::nullopt;
  const int64_t row_group = order_[position_++];
  if (!thread_.running()) read(row_group, 0);
  Outcome outcome = *queue_.pop();  // there will be one: only the destructor stops the queue
  held_ = outcome.bytes;
  if (outcome.failure) {
    position_ = order_.size();
    std::rethrow_exception(std::move(outcome.failure));
  }
  return std::move(outcome.table);
}

void RowGroupQueue::release() {
  const int64_t bytes = std::exchange(held_, 0);
  counter_->add(-bytes);  // before the thread can take the room
  queue_.release(bytes);
}

}  // namespace lockstep::parquet::internal
