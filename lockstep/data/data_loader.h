#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/base/rethrow_with_context.h>
#include <lockstep/data/collate.h>
#include <lockstep/data/data_loader_options.h>
#include <lockstep/data/datasets/iterable_dataset.h>
#include <lockstep/data/internal/batch_iterator.h>
#include <lockstep/data/internal/batch_pipeline.h>
#include <lockstep/data/internal/dataset_handle.h>
#include <lockstep/data/internal/epoch_planner.h>
#include <lockstep/data/internal/loading_scope.h>
#include <lockstep/data/pin_memory.h>

namespace lockstep::data {

namespace internal {

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
      "DataLoader's default collate function does not know this type of sample (see collate.h); give it a "
      "collate function that takes a std::vector of them, or the data set a "
      "get_batch(std::span<const int64_t>)");
  using Batch = std::decay_t<std::invoke_result_t<const Collate&, std::vector<Sample>>>;

  static Batch make(const Dataset& dataset, const Collate& collate, std::span<const int64_t> indices) {
    std::vector<Sample> samples;
    samples.reserve(indices.size());
    for (const int64_t index : indices) {
      LoadingScope::set_place(static_cast<int64_t>(samples.size()));
      try {
        samples.push_back(dataset.get(index));
      } catch (...) {
        rethrow_with_context("while loading sample " + std::to_string(index) + " of the data set");
      }
    }
    LoadingScope::set_place(0);
    return collate(std::move(samples));
  }
};

/// The data set's own batches, unless a collate function was given.
template <HasGetBatch Dataset>
requires(!IterableDataset<Dataset>) struct BatchMaker<Dataset, DefaultCollate> {
  using Batch = std::decay_t<decltype(std::declval<const Dataset&>().get_batch(std::span<const int64_t>()))>;

  static Batch make(const Dataset& dataset, const DefaultCollate& /*unused*/,
                    std::span<const int64_t> indices) {
    return dataset.get_batch(indices);
  }
};

/// The two halves of making a batch of an iterable data set.
template <class Dataset, class Collate>
requires IterableDataset<Dataset>
struct BatchMaker<Dataset, Collate> {
  using Samples = std::vector<StreamSample<Dataset>>;
  static_assert(
      std::invocable<const Collate&, Samples>,
      "DataLoader's default collate function does not know this type of sample (see collate.h); give "
      "it a collate function that takes a std::vector of them");
  using Batch = std::decay_t<std::invoke_result_t<const Collate&, Samples>>;

  static std::shared_ptr<void> draw(StreamOf<Dataset>& stream, int64_t most, int64_t& taken) {
    auto samples = std::make_shared<Samples>();
    samples->reserve(static_cast<size_t>(most));
    for (; taken < most; ++taken) {
      LoadingScope::set_place(taken);
      auto sample = stream.next();
      if (!sample) break;
      samples->push_back(std::move(*sample));
    }
    return samples;
  }
};

}  // namespace internal

/// Batches of a data set, epoch after epoch. After torch/utils/data/dataloader.py.
///
///     DataLoader loader(train, {.batch_size = 64, .sampler = &sampler, .num_workers = 2});
///     for (auto& batch : loader) step(batch.data, batch.target);
///
/// A map-style data set has `size() const` and `get(int64_t) const`, or, faster,
/// `get_batch(std::span<const int64_t>) const`; for an iterable one see IterableDataset. With workers these
/// are called from several background threads while the caller goes on, so they must be safe to call together
/// with each other and with whatever else uses the data set. Without a collate function, get_batch() is taken
/// where there is one; else the samples go through DefaultCollate. A collate function takes a std::vector of
/// samples and makes the batch, of any type, in the same thread; several workers may be in it at once.
///
/// Each `for` loop is an epoch with a new order: begin() asks the sampler for it in the calling thread.
/// Batches come in that order for any number of workers: worker w of N makes batches w, w + N, …, each at
/// most prefetch_factor ahead. Leaving the loop early ends the background threads (sends them to rest if they
/// are persistent) after the batches that they are making. The memory of a batch is its own, so it may be
/// kept. As in Python each epoch (with persistent_workers the first) draws one number from the generator, the
/// default one unless a seed is told, so the same seeds give the same order as Python's loader; from it come
/// the workers' seeds and those of sample_generator(), with which random transforms don't depend on the
/// number of workers either.
///
/// Errors: what goes wrong while a batch is made is thrown where that batch is asked for, after the ones
/// before it. c10 errors keep their type; others arrive as c10::Error with the original nested. The message
/// names the sample (the batch's samples where get_batch or collate failed). An index outside the data set is
/// a c10::IndexError. As with Python's next(), an epoch goes on after an error that was caught: the iterator
/// has no batch then, and so compares equal to the end, and the next ++ asks for the batch after it (but
/// for an error of the first batch, which begin() throws, one of a stream's next(), and one of
/// worker_init_fn). Until that ++, state_dict() has the failed batch among those to come. A batch that does
/// not come within options.timeout is a c10::Error that names it; the next ++ waits for it again, and leaving
/// the loop still waits until its worker returns.
///
/// Lifetime: a data set given as an lvalue is referred to and must outlive the loader and its iterators; a
/// temporary is moved into the loader. The sampler must outlive the loader. Iterators may outlive the loader.
/// An epoch under way in background threads doesn't survive fork(). Thread-safety: one thread at a time per
/// loader and per iterator; several loaders and iterators may be alive at once, but with persistent_workers
/// only one iterator of a loader.
template <class Dataset, class Collate = DefaultCollate>
class DataLoader {
  using Maker = internal::BatchMaker<Dataset, Collate>;
  static constexpr bool kIterable = IterableDataset<Dataset>;

 public:
  using Batch = typename Maker::Batch;

  /// Throws c10::ValueError for options that are wrong, with what to write instead.
  explicit DataLoader(const Dataset& dataset, const DataLoaderOptions& options = {}, Collate collate = {})
      : DataLoader(Source{internal::hold(dataset), std::move(collate)}, options) {}
  explicit DataLoader(Dataset&& dataset, const DataLoaderOptions& options = {}, Collate collate = {})
      : DataLoader(Source{internal::hold(std::move(dataset)), std::move(collate)}, options) {}

  /// The current batch and those to come. Move-only; the end is std::default_sentinel.
  using Iterator = internal::BatchIterator<Batch, internal::BatchPipeline>;

  /// Starts an epoch, or goes on with a loaded one, and waits for its first batch.
  Iterator begin() { return Iterator(planner_.start_epoch(recipe())); }
  std::default_sentinel_t end() const { return {}; }

  /// Batches per epoch. Of an iterable data set only where it has a size(), and then right if that is what
  /// stream() gives.
  int64_t size() const requires(!kIterable) { return planner_.batches(); }
  int64_t size() const requires(kIterable&& requires(const Dataset& dataset) { dataset.size(); }) {
    return planner_.batches_of(static_cast<int64_t>(source_->dataset->size()));
  }

  /// Seconds that callers of this loader have waited for batches, since it was made; with num_workers = 0
  /// that is the time in which batches were made. For ProgressBarOptions::waited. Any thread may ask.
  double waited() const { return planner_.waited(); }

  /// Where the latest epoch stands: what a loader of the same data set needs to hand out the remaining
  /// samples of it, each once and in the same order. The batches that begin() and ++ have given count as
  /// seen, those that workers have ready do not. Number of workers, prefetch_factor and (without a batch
  /// sampler) batch_size may differ in the loader that goes on. The sampler's state is included; the default
  /// generator's, which the program has for itself, is not, and neither are those of workers' own generators.
  /// Small: 5 KB for each generator.
  ///
  /// The last `unseen_batches` batches count as not seen, so the epoch that goes on gives them again: those
  /// of an unfinished step, say. With `end_unseen` so does the epoch's end, if the iterator has reached it;
  /// code that fetches batches before its user asks for them needs this. Throws c10::ValueError for more
  /// batches than this epoch's iterator has given.
  StateDict state_dict(int64_t unseen_batches = 0, bool end_unseen = false) const {
    return planner_.state_dict(unseen_batches, end_unseen);
  }
  /// Takes what state_dict() returned. The next begin() goes on with that epoch (without any batch, when all
  /// had been seen), or begins a new one if the old one had ended. Throws c10::ValueError for what no loader
  /// has saved. begin() throws it when the sampler then gives another order than the saved epoch's, as it
  /// does after a set_epoch() with another epoch, or on another number of ranks.
  void load_state_dict(const StateDict& state) { planner_.load_state_dict(state); }

  /// Tells the sampler which epoch the next begin() starts (DistributedSampler::set_epoch, say).
  void set_epoch(int64_t epoch) { planner_.set_epoch(epoch); }
  /// The next begin() goes on with an epoch of which the first `position` samples, in the order over all
  /// ranks, were seen: on another number of ranks than it was begun with, where load_state_dict() can't.
  /// False, and nothing changes, unless the sampler can do it, as DistributedSampler does. In place of
  /// load_state_dict().
  bool start_at(int64_t position) { return planner_.start_at(position); }

 private:
  struct Source {
    std::shared_ptr<const Dataset> dataset;  // not owning for an lvalue
    Collate collate;
  };

  DataLoader(Source source, const DataLoaderOptions& options)
      : planner_(size_of(*source.dataset), options),
        source_(std::make_shared<const Source>(std::move(source))) {}

  static std::optional<int64_t> size_of(const Dataset& dataset) {
    if constexpr (kIterable) {
      return std::nullopt;
    } else {
      return static_cast<int64_t>(dataset.size());
    }
  }

  // The source is shared, so that an iterator survives its loader.
  internal::BatchRecipe recipe() const {
    const auto pin = planner_.options().pin_memory ? internal::device_for_pinning() : std::nullopt;
    const auto finished = [pin](Batch batch) -> std::shared_ptr<void> {
      if (!pin) return std::make_shared<Batch>(std::move(batch));
      const internal::PinningScope scope(*pin);
      return std::make_shared<Batch>(pin_memory(std::move(batch)));
    };
    internal::BatchRecipe recipe;
    if constexpr (kIterable) {
      auto stream = std::make_shared<StreamOf<Dataset>>(source_->dataset->stream());
      skip_samples(*stream, planner_.seen_before());
      recipe.draw = [stream](int64_t most, int64_t& taken) { return Maker::draw(*stream, most, taken); };
      recipe.finish = [source = source_, finished](std::shared_ptr<void> drawn) {
        return finished(
            source->collate(std::move(*std::static_pointer_cast<typename Maker::Samples>(drawn))));
      };
    } else {
      recipe.make = [source = source_, finished](std::span<const int64_t> indices) {
        return finished(Maker::make(*source->dataset, source->collate, indices));
      };
    }
    return recipe;
  }

  internal::EpochPlanner planner_;
  std::shared_ptr<const Source> source_;
};

}  // namespace lockstep::data
