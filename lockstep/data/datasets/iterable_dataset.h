#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/base/place_in_world.h>
#include <lockstep/data/internal/dataset_handle.h>

namespace lockstep::data {

/// What an epoch's samples come from when they can only be read one after the other: next() returns a
/// std::optional of one, and nothing at the end. It may have `skip(int64_t count)`, which passes over so many
/// samples (or to the end) faster than next() does; a resumed epoch and other ranks' shares are passed over.
template <class Stream>
concept SampleStream = requires(Stream& stream) {
  { stream.next().has_value() } -> std::same_as<bool>;
  *stream.next();
};

/// An iterable data set for DataLoader, after torch.utils.data.IterableDataset: `stream() const` begins at
/// its first sample.
///
///     struct Lines {                                         // the lines of a file
///       struct Stream {
///         std::optional<std::string> next() {
///           std::string line;
///           return std::getline(file, line) ? std::optional(line) : std::nullopt;
///         }
///         std::ifstream file;
///       };
///       Stream stream() const { return {std::ifstream(path)}; }
///       std::string path;
///     };
///     DataLoader loader(DistributedStream(Lines{path}), {.batch_size = 32, .num_workers = 4}, parse);
///
/// All workers of a loader share one stream: they draw a batch's samples from it in turns, and collate them
/// at the same time. So nothing comes twice or gets lost, and batches come in the stream's order for any
/// number of workers. What costs time (decoding, tokenising) belongs into the collate function, next() should
/// read. stream() is called in the thread that calls begin(); next() is called from the workers, never from
/// two at a time. Ranks share the data with DistributedStream.
template <class Dataset>
concept IterableDataset = requires(const Dataset& dataset) {
  { dataset.stream() } -> SampleStream;
};

template <IterableDataset Dataset>
using StreamOf = std::decay_t<decltype(std::declval<const Dataset&>().stream())>;
template <IterableDataset Dataset>
using StreamSample = std::decay_t<decltype(*std::declval<StreamOf<Dataset>&>().next())>;

/// Passes over `count` samples of a stream, or to its end.
template <SampleStream Stream>
void skip_samples(Stream& stream, int64_t count) {
  if constexpr (requires { stream.skip(count); }) {
    if (count > 0) stream.skip(count);
  } else {
    while (count-- > 0 && stream.next()) continue;
  }
}

struct DistributedStreamOptions {
  std::optional<int64_t> num_replicas = std::nullopt;  ///< the default group's world size unless told
  std::optional<int64_t> rank = std::nullopt;          ///< the default group's rank unless told
  /// Leave out the last samples when they don't go round, so that all ranks get equally many. Without it the
  /// first ranks get one more.
  bool drop_last = false;
};

/// One rank's share of an iterable data set: samples rank, rank + num_replicas, … Each sample goes to exactly
/// one rank (none, at the end, with drop_last). Every rank reads the whole stream, and skips what is not its
/// own; a data set of many files does better to give each rank its files.
template <IterableDataset Dataset>
class DistributedStream {
 public:
  class Stream {
   public:
    Stream(StreamOf<Dataset> stream, int64_t num_replicas, int64_t rank, bool drop_last)
        : stream_(std::move(stream)), num_replicas_(num_replicas), rank_(rank), drop_last_(drop_last) {}

    std::optional<StreamSample<Dataset>> next() {
      skip_samples(stream_, std::exchange(rest_of_round_, 0) + rank_);
      auto mine = stream_.next();
      if (!mine) return std::nullopt;
      rest_of_round_ = num_replicas_ - 1 - rank_;
      if (drop_last_ && rest_of_round_ > 0) {  // is the round complete?
        skip_samples(stream_, rest_of_round_ - 1);
        rest_of_round_ = 0;
        if (!stream_.next()) return std::nullopt;
      }
      return mine;
    }
    void skip(int64_t count) {
      skip_samples(stream_, std::exchange(rest_of_round_, 0) + count * num_replicas_);
    }

   private:
    StreamOf<Dataset> stream_;
    int64_t num_replicas_;
    int64_t rank_;
    bool drop_last_;
    int64_t rest_of_round_ = 0;  // other ranks' samples that stand before the next round
  };

  /// A data set given as an lvalue is referred to and must outlive this object; a temporary is moved in.
  /// Throws as DistributedSampler does.
  explicit DistributedStream(const Dataset& dataset, const DistributedStreamOptions& options = {})
      : DistributedStream(internal::hold(dataset), options) {}
  explicit DistributedStream(Dataset&& dataset, const DistributedStreamOptions& options = {})
      : DistributedStream(internal::hold(std::move(dataset)), options) {}

  Stream stream() const { return {dataset_->stream(), num_replicas_, rank_, drop_last_}; }

 private:
  DistributedStream(std::shared_ptr<const Dataset> dataset, const DistributedStreamOptions& options)
      : dataset_(std::move(dataset)), drop_last_(options.drop_last) {
    const auto place = place_in_world("DistributedStream", options.num_replicas, options.rank);
    num_replicas_ = place.num_replicas;
    rank_ = place.rank;
  }

  std::shared_ptr<const Dataset> dataset_;
  bool drop_last_;
  int64_t num_replicas_ = 1;
  int64_t rank_ = 0;
};

/// Iterable data sets one after the other. ChainDataset of torch/utils/data/dataset.py.
template <IterableDataset Dataset>
class ChainDataset {
 public:
  class Stream {
   public:
    explicit Stream(std::shared_ptr<const std::vector<Dataset>> datasets) : datasets_(std::move(datasets)) {}
    std::optional<StreamSample<Dataset>> next() {
      for (; place_ < datasets_->size(); ++place_, stream_.reset()) {
        if (!stream_) stream_.emplace((*datasets_)[place_].stream());
        if (auto sample = stream_->next()) return sample;
      }
      return std::nullopt;
    }

   private:
    std::shared_ptr<const std::vector<Dataset>> datasets_;
    size_t place_ = 0;
    std::optional<StreamOf<Dataset>> stream_;
  };

  explicit ChainDataset(std::vector<Dataset> datasets)
      : datasets_(std::make_shared<const std::vector<Dataset>>(std::move(datasets))) {}
  Stream stream() const { return Stream(datasets_); }

 private:
  std::shared_ptr<const std::vector<Dataset>> datasets_;
};

}  // namespace lockstep::data
