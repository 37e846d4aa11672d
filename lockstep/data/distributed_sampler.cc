#include <c10/util/Exception.h>

#include <lockstep/base/world_defaults.h>
#include <lockstep/data/distributed_sampler.h>
#include <lockstep/data/internal/random.h>

namespace lockstep::data {

DistributedSampler::DistributedSampler(int64_t size, DistributedSamplerOptions options)
    : dataset_size_(size), shuffle_(options.shuffle), seed_(options.seed) {
  TORCH_CHECK_VALUE(size >= 0, "DistributedSampler: size is ", size, "; a data set has 0 or more samples");
  if (!options.num_replicas || !options.rank) {
    const auto world = world_defaults();
    TORCH_CHECK_VALUE(
        world,
        "Default process group has not been initialized, so DistributedSampler knows neither rank nor "
        "world size: call lockstep::init_process_group() first, or give it num_replicas and rank.");
    if (!options.num_replicas) options.num_replicas = world->world_size;
    if (!options.rank) options.rank = world->rank;
  }
  num_replicas_ = *options.num_replicas;
  rank_ = *options.rank;
  TORCH_CHECK_VALUE(num_replicas_ > 0, "Invalid num_replicas ", num_replicas_, ", it should be at least 1");
  TORCH_CHECK_VALUE(rank_ >= 0 && rank_ < num_replicas_, "Invalid rank ", rank_,
                    ", rank should be in the interval [0, ", num_replicas_ - 1, "]");
  num_samples_ = size / num_replicas_;
  if (!options.drop_last && size % num_replicas_ != 0) ++num_samples_;
}

DistributedSampler::DistributedSampler(int64_t size, int64_t num_replicas, int64_t rank, bool shuffle,
                                       int64_t seed, bool drop_last)
    : DistributedSampler(size, DistributedSamplerOptions{.num_replicas = num_replicas,
                                                         .rank = rank,
                                                         .shuffle = shuffle,
                                                         .seed = seed,
                                                         .drop_last = drop_last}) {}

std::vector<int64_t> DistributedSampler::indices() {
  std::vector<int64_t> permutation;
  if (shuffle_ && num_samples_ > 0) {
    permutation = internal::random_permutation(
        dataset_size_,
        internal::make_generator(static_cast<uint64_t>(seed_) + static_cast<uint64_t>(epoch_)));
  }
  std::vector<int64_t> mine;
  mine.reserve(static_cast<size_t>(num_samples_));
  for (int64_t i = 0; i < num_samples_; ++i) {
    // Padding repeats the permutation from its start, as often as it takes when there are more ranks than
    // samples.
    const int64_t position = (rank_ + i * num_replicas_) % dataset_size_;
    mine.push_back(shuffle_ ? permutation[static_cast<size_t>(position)] : position);
  }
  return mine;
}

}  // namespace lockstep::data
