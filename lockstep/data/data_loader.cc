#include <c10/util/Exception.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/data/internal/random.h>

namespace lockstep::data::internal {

EpochPlanner::EpochPlanner(int64_t dataset_size, const DataLoaderOptions& options)
    : dataset_size_(dataset_size), options_(options) {
  TORCH_CHECK_VALUE(dataset_size >= 0, "DataLoader: the data set's size() is ", dataset_size);
  TORCH_CHECK_VALUE(options.batch_size > 0,
                    "batch_size should be a positive integer value, but got batch_size=", options.batch_size);
  TORCH_CHECK_VALUE(
      options.sampler == nullptr || !options.shuffle,
      "sampler option is mutually exclusive with shuffle; to shuffle with a sampler, tell the sampler");
  TORCH_CHECK_VALUE(options.num_workers >= 0,
                    "num_workers option should be non-negative, but got num_workers=", options.num_workers,
                    "; use num_workers=0 to load in the calling thread");
  TORCH_CHECK_VALUE(
      options.num_workers <= 1, "num_workers=", options.num_workers,
      ": more than one loading thread is not there yet; use 1, or 0 to load in the calling thread");
  TORCH_CHECK_VALUE(
      options.prefetch_factor > 0,
      "prefetch_factor should be at least 1, but got prefetch_factor=", options.prefetch_factor);
  TORCH_CHECK_VALUE(!options.pin_memory,
                    "pin_memory=true: pinned batches are not there yet; leave it false and copy "
                    "to the device with batch.data.to(device)");
  if (options.seed) generator_ = make_generator(static_cast<uint64_t>(*options.seed));
  if (options.sampler != nullptr) return;
  if (options.shuffle) {
    own_sampler_ = std::make_unique<RandomSampler>(dataset_size, generator_);
  } else {
    own_sampler_ = std::make_unique<SequentialSampler>(dataset_size);
  }
}

int64_t EpochPlanner::batches() const {
  const int64_t samples = sampler().size();
  return samples / options_.batch_size + (!options_.drop_last && samples % options_.batch_size != 0 ? 1 : 0);
}

std::unique_ptr<BatchPipeline> EpochPlanner::start_epoch(MakeBatch make_batch) {
  // Python draws a base seed for its workers at the start of each epoch, whatever the sampler. Drawing it too
  // keeps the generator, and with it every later random number of the program, at Python's state.
  draw_seed(generator_);
  BatchPipeline::Plan plan{.indices = sampler().indices(),
                           .batch_size = options_.batch_size,
                           .drop_last = options_.drop_last,
                           .dataset_size = dataset_size_,
                           .ahead = options_.num_workers > 0 ? options_.prefetch_factor : 0};
  return std::make_unique<BatchPipeline>(std::move(plan), std::move(make_batch));
}

}  // namespace lockstep::data::internal
