#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/base/rethrow_with_context.h>
#include <lockstep/data/example.h>
#include <lockstep/data/internal/batch_pipeline.h>
#include <lockstep/data/sampler.h>

namespace lockstep::data {

struct DataLoaderOptions {
  /// Samples per batch of this process (not of the whole job).
  int64_t batch_size = 1;
  /// The order of each epoch; not owned, must outlive the loader. None: the data set's order, or shuffle's.
  Sampler* sampler = nullptr;
  /// A new random order in each epoch; not together with a sampler.
  bool shuffle = false;
  /// 0: batches are made when they are asked for, in the calling thread. 1: ahead of it, in a background
  /// thread.
  int num_workers = 0;
  /// Leave out the last batch when it is smaller than batch_size.
  bool drop_last = false;
  /// With a worker: how many batches are ready or in the making before they are asked for.
  int prefetch_factor = 2;
  /// Not there yet: true is refused.
  bool pin_memory = false;
  /// Seed of shuffle's generator, as Python's generator=torch.Generator().manual_seed(seed). None: each epoch
  /// draws from torch's default CPU generator, so torch::manual_seed() decides the order.
  std::optional<int64_t> seed = std::nullopt;
};

namespace internal {

/// What a loader knows without its data set's type: the checked options and the order of the epochs.
class EpochPlanner {
 public:
  EpochPlanner(int64_t dataset_size, const DataLoaderOptions& options);
  int64_t batches() const;
  std::unique_ptr<BatchPipeline> start_epoch(MakeBatch make_batch);

 private:
  Sampler& sampler() const { return options_.sampler != nullptr ? *options_.sampler : *own_sampler_; }

  int64_t dataset_size_;
  DataLoaderOptions options_;
  std::optional<at::Generator> generator_;  // of options_.seed
  std::unique_ptr<Sampler> own_sampler_;    // when options_.sampler is none
};

template <class Dataset>
concept HasGetBatch = requires(const Dataset& dataset, std::span<const int64_t> indices) {
  dataset.get_batch(indices);
};

/// How a batch is made, and of which type it is.
template <class Dataset, class Collate>
struct BatchMaker {
  static std::decay_t<decltype(std::declval<const Dataset&>().get(int64_t{}))> sample_type();
  using Sample = decltype(sample_type());
  static_assert(
      std::invocable<const Collate&, std::vector<Sample>>,
      "DataLoader stacks samples that are at::Tensor or data::Example; for others give it a collate function "
      "that takes a std::vector of them, or the data set a get_batch(std::span<const int64_t>)");
  using Batch = std::decay_t<std::invoke_result_t<const Collate&, std::vector<Sample>>>;

  static Batch make(const Dataset& dataset, const Collate& collate, std::span<const int64_t> indices) {
    std::vector<Sample> samples;
    samples.reserve(indices.size());
    for (const int64_t index : indices) {
      try {
        samples.push_back(dataset.get(index));
      } catch (...) {
        rethrow_with_context("while loading sample " + std::to_string(index) + " of the data set");
      }
    }
    return collate(std::move(samples));
  }
};

/// The data set's own batches, unless a collate function was given.
template <HasGetBatch Dataset>
struct BatchMaker<Dataset, DefaultCollate> {
  using Batch = std::decay_t<decltype(std::declval<const Dataset&>().get_batch(std::span<const int64_t>()))>;

  static Batch make(const Dataset& dataset, const DefaultCollate& /*unused*/,
                    std::span<const int64_t> indices) {
    return dataset.get_batch(indices);
  }
};

}  // namespace internal

/// Batches of a data set, epoch after epoch. After torch/utils/data/dataloader.py, map-style.
///
///     DataLoader loader(train, {.batch_size = 64, .sampler = &sampler, .num_workers = 1});
///     for (auto& batch : loader) step(batch.data, batch.target);
///
/// A data set has `size() const` and `get(int64_t) const`, or, faster, `get_batch(std::span<const int64_t>)
/// const`. With a worker these are called from a background thread while the caller goes on, so they must be
/// safe to call together with whatever else uses the data set. Without a collate function, get_batch() is
/// taken where there is one; else the samples of get(), at::Tensor or Example, are stacked. A collate
/// function takes a std::vector of samples and makes the batch, of any type, in the same thread.
///
/// Each `for` loop is an epoch with a new order: begin() asks the sampler for it in the calling thread.
/// Leaving the loop early ends the background thread after the batch that it is making. Batches come in the
/// sampler's order; the memory of a batch is its own, so it may be kept. As in Python each epoch draws one
/// number from the generator (the default one unless a seed is told), so the same seeds give the same order
/// as Python's loader.
///
/// Errors: what goes wrong while a batch is made is thrown where that batch is asked for, after the ones
/// before it. c10 errors keep their type; others arrive as c10::Error with the original nested. The message
/// names the sample (the batch's samples where get_batch or collate failed). An index outside the data set is
/// a c10::IndexError.
///
/// Lifetime: a data set given as an lvalue is referred to and must outlive the loader and its iterators; a
/// temporary is moved into the loader. The sampler must outlive the loader. Iterators may outlive the loader.
/// An epoch under way in a background thread doesn't survive fork(). Thread-safety: one thread at a time per
/// loader and per iterator; several loaders and iterators may be alive at once.
template <class Dataset, class Collate = DefaultCollate>
class DataLoader {
  using Maker = internal::BatchMaker<Dataset, Collate>;

 public:
  using Batch = typename Maker::Batch;

  /// Throws c10::ValueError for options that are wrong or not there yet, with what to write instead.
  explicit DataLoader(const Dataset& dataset, const DataLoaderOptions& options = {}, Collate collate = {})
      : DataLoader(Source{{std::shared_ptr<void>(), &dataset}, std::move(collate)}, options) {}
  explicit DataLoader(Dataset&& dataset, const DataLoaderOptions& options = {}, Collate collate = {})
      : DataLoader(Source{std::make_shared<const Dataset>(std::move(dataset)), std::move(collate)}, options) {
  }

  /// The current batch and those to come. Move-only; the end is std::default_sentinel.
  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using iterator_concept = std::input_iterator_tag;

    Batch& operator*() const { return *batch_; }
    Batch* operator->() const { return batch_.get(); }
    Iterator& operator++() {
      batch_.reset();  // its memory may serve the next one
      batch_ = std::static_pointer_cast<Batch>(pipeline_->next());
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& iterator, std::default_sentinel_t /*end*/) {
      return !iterator.batch_;
    }

   private:
    friend class DataLoader;
    explicit Iterator(std::unique_ptr<internal::BatchPipeline> pipeline) : pipeline_(std::move(pipeline)) {
      ++*this;
    }

    std::unique_ptr<internal::BatchPipeline> pipeline_;
    std::shared_ptr<Batch> batch_;
  };

  /// Starts an epoch and waits for its first batch.
  Iterator begin() {
    // The source is shared, so that an iterator survives its loader.
    return Iterator(
        planner_.start_epoch([source = source_](std::span<const int64_t> indices) -> std::shared_ptr<void> {
          return std::make_shared<Batch>(Maker::make(*source->dataset, source->collate, indices));
        }));
  }
  std::default_sentinel_t end() const { return {}; }

  /// Batches per epoch.
  int64_t size() const { return planner_.batches(); }

 private:
  struct Source {
    std::shared_ptr<const Dataset> dataset;  // not owning for an lvalue
    Collate collate;
  };

  DataLoader(Source source, const DataLoaderOptions& options)
      : planner_(static_cast<int64_t>(source.dataset->size()), options),
        source_(std::make_shared<const Source>(std::move(source))) {}

  internal::EpochPlanner planner_;
  std::shared_ptr<const Source> source_;
};

}  // namespace lockstep::data
