#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <lockstep/base/training/step_mark.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/data/worker_info.h>
#include <lockstep/parquet/internal/row_group_queue.h>
#include <lockstep/parquet/parquet_batches.h>

namespace lockstep::data {
namespace internal {

/// Cuts the row groups of one epoch into batches.
class BatchCutter {
 public:
  BatchCutter(const ParquetDataset& dataset, const ParquetBatchesOptions& options, int64_t rows,
              std::shared_ptr<BytesInFlight> bytes)
      : sampler_(options.sampler != nullptr ? std::optional(*options.sampler) : std::nullopt),
        batch_size_(options.batch_size),
        rows_left_(options.drop_last ? rows / options.batch_size * options.batch_size : rows),
        loader_(bytes.get()),
        queue_(dataset, row_groups_of(dataset), options.memory_limit, options.read_ahead, std::move(bytes)) {}

  std::optional<Table> next() {
    // Not earlier: the caller may have held views of it until now.
    if (row_group_ && position_ == row_group_->rows()) leave();
    const int64_t wanted = std::min(batch_size_, rows_left_);
    if (wanted == 0) {
      if (row_group_) leave();
      return std::nullopt;
    }
    // A DataLoader's thread trains nothing.
    if (get_worker_info() == nullptr) mark_step(StepMark::kBatch, loader_);
    // Readers of traces know a loader by the first part, which is Python's.
    RECORD_USER_SCOPE("enumerate(DataLoader)#lockstep::data::ParquetBatches.next");
    std::vector<Table> pieces;
    for (int64_t missing = wanted; missing > 0;) {
      if (!row_group_ && !enter()) return std::nullopt;
      const int64_t count = std::min(missing, row_group_->rows() - position_);
      Table piece = take(count);
      missing -= count;
      // A batch goes on in the next row group: this one must go before that one may come.
      if (missing > 0) {
        if (order_.empty()) piece = piece.clone();
        leave();
      }
      if (count > 0) pieces.push_back(std::move(piece));
    }
    rows_left_ -= wanted;
    enter_phase(TrainingPhase::kForward);
    count_samples(wanted);
    return pieces.size() == 1 ? std::move(pieces.front()) : Table::concat(pieces);
  }

 private:
  std::vector<int64_t> row_groups_of(const ParquetDataset& dataset) {
    if (sampler_) return sampler_->indices();
    std::vector<int64_t> all(static_cast<size_t>(dataset.size()));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  bool enter() {
    row_group_ = queue_.next();
    if (!row_group_) return false;
    position_ = 0;
    if (sampler_) order_ = sampler_->row_order(row_group_->row_group(), row_group_->rows());
    return true;
  }

  Table take(int64_t count) {
    const int64_t begin = std::exchange(position_, position_ + count);
    if (order_.empty()) return row_group_->slice(begin, begin + count);
    return row_group_->select(
        std::span(order_).subspan(static_cast<size_t>(begin), static_cast<size_t>(count)));
  }

  void leave() {
    row_group_.reset();
    order_.clear();
    queue_.release();
  }

  std::optional<RowGroupSampler> sampler_;  // as it was when the epoch began
  const int64_t batch_size_;
  int64_t rows_left_;
  const void* const loader_;  // its address, the same in all epochs
  std::optional<Table> row_group_;
  int64_t position_ = 0;        // in row_group_
  std::vector<int64_t> order_;  // of row_group_'s rows; empty: their own
  parquet::internal::RowGroupQueue queue_;
};

}  // namespace internal

ParquetBatches::ParquetBatches(ParquetDataset dataset, const ParquetBatchesOptions& options)
    : dataset_(std::move(dataset)), options_(options), bytes_(std::make_shared<internal::BytesInFlight>()) {
  TORCH_CHECK_VALUE(options_.batch_size > 0,
                    "ParquetBatches: batch_size should be a positive integer, but is ", options_.batch_size);
  TORCH_CHECK_VALUE(options_.memory_limit > 0,
                    "ParquetBatches: memory_limit should be a positive number of bytes, "
                    "but is ",
                    options_.memory_limit);
  TORCH_CHECK_VALUE(
      !options_.even_batches || options_.sampler != nullptr,
      "ParquetBatches: even_batches makes ranks alike, so it needs a sampler that knows of ranks");
}

int64_t ParquetBatches::rows_of_epoch() const {
  if (options_.sampler == nullptr) return dataset_.num_rows();
  return options_.even_batches ? options_.sampler->fewest_rows() : options_.sampler->num_rows();
}

int64_t ParquetBatches::size() const {
  const int64_t rows = rows_of_epoch();
  return (options_.drop_last ? rows : rows + options_.batch_size - 1) / options_.batch_size;
}

ParquetBatches::Iterator ParquetBatches::begin() {
  const int64_t rows = rows_of_epoch();
  TORCH_CHECK_VALUE(!options_.even_batches || rows > 0 || dataset_.num_rows() == 0, "ParquetBatches: the ",
                    dataset_.size(), " row groups are too few for even_batches on ",
                    options_.sampler->num_replicas(),
                    " ranks: one of them has no rows at all; write the file with ",
                    "smaller row groups (pyarrow: row_group_size)");
  return Iterator(std::make_unique<internal::BatchCutter>(dataset_, options_, rows, bytes_));
}

int64_t ParquetBatches::bytes_in_flight() const {
  return bytes_->now();
}

int64_t ParquetBatches::peak_bytes_in_flight() const {
  return bytes_->peak();
}

ParquetBatches::Iterator::Iterator(std::unique_ptr<internal::BatchCutter> cutter)
    : cutter_(std::move(cutter)) {
  ++*this;
}

ParquetBatches::Iterator::Iterator(Iterator&&) noexcept = default;
ParquetBatches::Iterator& ParquetBatches::Iterator::operator=(Iterator&&) noexcept = default;
ParquetBatches::Iterator::~Iterator() = default;

ParquetBatches::Iterator& ParquetBatches::Iterator::operator++() {
  batch_.reset();  // its memory may serve the next one
  batch_ = cutter_->next();
  return *this;
}

}  // namespace lockstep::data
