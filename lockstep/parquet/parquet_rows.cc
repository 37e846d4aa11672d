#include <algorithm>
#include <list>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/parquet/parquet_rows.h>

namespace lockstep::data {

/// The row groups used last, in memory.
class ParquetRows::Cache {
 public:
  Cache(ParquetDataset dataset, int64_t memory_limit)
      : dataset_(std::move(dataset)), memory_limit_(memory_limit), ends_(dataset_.row_counts()) {
    std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
  }

  int64_t rows() const { return dataset_.num_rows(); }

  /// The row group of a row, and the row's place in it.
  std::pair<int64_t, int64_t> find(int64_t row) const {
    TORCH_CHECK_INDEX(row >= 0 && row < rows(), "row ", row, " is out of range for ParquetRows with ", rows(),
                      " rows");
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), row);
    const int64_t begin = end == ends_.begin() ? 0 : *(end - 1);
    return {end - ends_.begin(), row - begin};
  }

  Table row_group(int64_t number) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (const Table* found = look_up(number)) return *found;
    }
    // Several threads may decode the same one, but none waits for the decoding of others.
    Table table = dataset_.get(number);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const Table* found = look_up(number)) return *found;
    const int64_t bytes = table.nbytes();
    if (bytes > memory_limit_) return table;
    for (; bytes_ + bytes > memory_limit_; recent_.pop_back()) bytes_ -= recent_.back().nbytes();
    recent_.push_front(table);
    bytes_ += bytes;
    return table;
  }

  int64_t bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return bytes_;
  }

 private:
  /// With mutex_ held.
  const Table* look_up(int64_t number) {
    const auto place = std::find_if(recent_.begin(), recent_.end(),
                                    [&](const Table& table) { return table.row_group() == number; });
    if (place == recent_.end()) return nullptr;
    recent_.splice(recent_.begin(), recent_, place);
    return &recent_.front();
  }

  const ParquetDataset dataset_;
  const int64_t memory_limit_;
  std::vector<int64_t> ends_;  // of each row group: the number of the row after its last
  mutable std::mutex mutex_;
  std::list<Table> recent_;  // guarded by mutex_; the last used one first
  int64_t bytes_ = 0;        // guarded by mutex_
};

ParquetRows::ParquetRows(ParquetDataset dataset, const ParquetRowsOptions& options)
    : cache_(std::make_shared<Cache>(std::move(dataset), options.memory_limit)) {
  TORCH_CHECK_VALUE(options.memory_limit >= 0, "ParquetRows: memory_limit is ", options.memory_limit,
                    ", it should be 0 or more bytes");
}

int64_t ParquetRows::size() const {
  return cache_->rows();
}

int64_t ParquetRows::cached_bytes() const {
  return cache_->bytes();
}

Table ParquetRows::get(int64_t row) const {
  return get_batch({&row, 1});
}

Table ParquetRows::get_batch(std::span<const int64_t> rows) const {
  TORCH_CHECK_VALUE(!rows.empty(), "ParquetRows::get_batch() needs at least one row");
  struct Wanted {
    int64_t row_group, row, position;
  };
  std::vector<Wanted> wanted;
  wanted.reserve(rows.size());
  for (const int64_t row : rows) {
    const auto [row_group, place] = cache_->find(row);
    wanted.push_back({row_group, place, static_cast<int64_t>(wanted.size())});
  }
  // Each row group in one go; afterwards the rows go back to where they were asked for.
  std::stable_sort(wanted.begin(), wanted.end(),
                   [](const Wanted& a, const Wanted& b) { return a.row_group < b.row_group; });
  std::vector<Table> parts;
  std::vector<int64_t> chosen;
  std::vector<int64_t> back(rows.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    back[static_cast<size_t>(wanted[i].position)] = static_cast<int64_t>(i);
    chosen.push_back(wanted[i].row);
    if (i + 1 == wanted.size() || wanted[i + 1].row_group != wanted[i].row_group) {
      parts.push_back(cache_->row_group(wanted[i].row_group).select(chosen));
      chosen.clear();
    }
  }
  if (parts.size() == 1) return std::move(parts.front());  // sorting has changed nothing
  return Table::concat(parts).select(back);
}

}  // namespace lockstep::data
