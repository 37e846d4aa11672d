#include <utility>

#include <ATen/record_function.h>

#include <lockstep/parquet/internal/row_group_queue.h>

namespace lockstep::parquet::internal {

RowGroupQueue::RowGroupQueue(ParquetDataset dataset, std::vector<int64_t> order, int64_t memory_limit,
                             bool background, std::shared_ptr<BytesInFlight> bytes)
    : dataset_(std::move(dataset)),
      order_(std::move(order)),
      memory_limit_(memory_limit),
      counter_(std::move(bytes)) {
  if (background) thread_.start("lockstep-rows", [this] { run(); });
}

RowGroupQueue::~RowGroupQueue() {
  if (fork_guard_.in_forked_child()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_->notify_all();
  thread_.join();
  counter_->add(-in_flight_);
}

RowGroupQueue::Outcome RowGroupQueue::read(int64_t row_group, int64_t expected) noexcept {
  RECORD_USER_SCOPE("Parquet: read a row group");
  Outcome outcome;
  try {
    outcome.table = dataset_.get(row_group);
    outcome.bytes = outcome.table->nbytes();
  } catch (...) {
    outcome.failure = std::current_exception();
  }
  counter_->add(outcome.bytes - expected);
  const std::lock_guard<std::mutex> lock(mutex_);
  in_flight_ += outcome.bytes - expected;
  return outcome;
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
      std::unique_lock<std::mutex> lock(mutex_);
      changed_->wait(lock,
                     [&] { return stop_ || in_flight_ == 0 || in_flight_ + expected <= memory_limit_; });
      if (stop_) return;
      in_flight_ += expected;
    }
    counter_->add(expected);
    Outcome outcome = read(row_group, expected);
    const bool failed = outcome.failure != nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ready_.push_back(std::move(outcome));
    }
    changed_->notify_all();
    if (failed) return;
  }
}

std::optional<Table> RowGroupQueue::next() {
  if (position_ == order_.size()) return std::nullopt;
  const int64_t row_group = order_[position_++];
  Outcome outcome;
  if (thread_.running()) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_->wait(lock, [&] { return !ready_.empty(); });
    outcome = std::move(ready_.front());
    ready_.pop_front();
  } else {
    outcome = read(row_group, 0);
  }
  held_ = outcome.bytes;
  if (outcome.failure) {
    position_ = order_.size();
    std::rethrow_exception(std::move(outcome.failure));
  }
  return std::move(outcome.table);
}

void RowGroupQueue::release() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_flight_ -= held_;
  }
  counter_->add(-held_);
  held_ = 0;
  changed_->notify_all();
}

}  // namespace lockstep::parquet::internal
