#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/place_in_world.h>
#include <lockstep/data/internal/random.h>
#include <lockstep/data/samplers/distributed_sampler.h>

namespace lockstep::data {

DistributedSampler::DistributedSampler(int64_t size, DistributedSamplerOptions options)
    : dataset_size_(size), shuffle_(options.shuffle), drop_last_(options.drop_last), seed_(options.seed) {
  TORCH_CHECK_VALUE(size >= 0, "DistributedSampler: size is ", size, "; a data set has 0 or more samples");
  const auto place = place_in_world("DistributedSampler", options.num_replicas, options.rank);
  num_replicas_ = place.num_replicas;
  rank_ = place.rank;
  num_samples_ = samples_from(0);
}

int64_t DistributedSampler::samples_from(int64_t start) const {
  const int64_t left = std::max<int64_t>(dataset_size_ - start, 0);
  return left / num_replicas_ + (!drop_last_ && left % num_replicas_ != 0 ? 1 : 0);
}

bool DistributedSampler::start_at(int64_t position) {
  TORCH_CHECK_VALUE(position >= 0, "DistributedSampler::start_at: the position is ", position,
                    "; it must not be negative");
  start_ = position;
  latest_start_.reset();
  return true;
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
  const int64_t start = std::exchange(start_, 0);
  latest_start_ = start;
  const int64_t count = samples_from(start);
  if (shuffle_ && count > 0) {
    permutation = internal::random_permutation(
        dataset_size_,
        internal::make_generator(static_cast<uint64_t>(seed_) + static_cast<uint64_t>(epoch_)));
  }
  std::vector<int64_t> mine;
  mine.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    // Padding repeats the permutation from its start, as often as it takes when there are more ranks than
    // samples.
    const int64_t position = (start + rank_ + i * num_replicas_) % dataset_size_;
    mine.push_back(shuffle_ ? permutation[static_cast<size_t>(position)] : position);
  }
  return mine;
}

void DistributedSampler::load_state_dict(const StateDict& state) {
  epoch_ = state_value<int64_t>(state, "epoch", "DistributedSampler");
  start_at(state.count("start") != 0 ? state_value<int64_t>(state, "start", "DistributedSampler") : 0);
}

StateDict DistributedSampler::state_dict() const {
  StateDict state{{"epoch", epoch_}};
  if (const int64_t start = latest_start_.value_or(start_); start != 0) state["start"] = start;
  return state;
}

DistributedEvalSampler::DistributedEvalSampler(int64_t size, const DistributedEvalSamplerOptions& options)
    : dataset_size_(size) {
  TORCH_CHECK_VALUE(size >= 0, "DistributedEvalSampler: size is ", size,
                    "; a data set has 0 or more samples");
  const auto place = place_in_world("DistributedEvalSampler", options.num_replicas, options.rank);
  num_replicas_ = place.num_replicas;
  rank_ = place.rank;
}

int64_t DistributedEvalSampler::size() const {
  return dataset_size_ / num_replicas_ + (rank_ < dataset_size_ % num_replicas_ ? 1 : 0);
}

std::vector<int64_t> DistributedEvalSampler::indices() {
  std::vector<int64_t> mine;
  mine.reserve(static_cast<size_t>(size()));
  for (int64_t index = rank_; index < dataset_size_; index += num_replicas_) mine.push_back(index);
  return mine;
}

}  // namespace lockstep::data
