#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/ops/multinomial.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/data/internal/random.h>
#include <lockstep/data/samplers/sampler.h>

namespace lockstep::data {
namespace {

void check_size(const char* sampler, int64_t size) {
  TORCH_CHECK_VALUE(size >= 0, sampler, ": size is ", size, "; a data set has 0 or more samples");
}

void check_num_samples(int64_t num_samples) {
  TORCH_CHECK_VALUE(num_samples > 0,
                    "num_samples should be a positive integer value, but got num_samples=", num_samples);
}

}  // namespace

SequentialSampler::SequentialSampler(int64_t size) : size_(size) {
  check_size("SequentialSampler", size);
}

std::vector<int64_t> SequentialSampler::indices() {
  std::vector<int64_t> order(static_cast<size_t>(size_));
  std::iota(order.begin(), order.end(), int64_t{0});
  return order;
}

RandomSampler::RandomSampler(int64_t size, RandomSamplerOptions options)
    : size_(size),
      replacement_(options.replacement),
      num_samples_(options.num_samples.value_or(size)),
      source_(options.generator),
      own_seed_(!options.generator) {
  check_size("RandomSampler", size);
  if (options.num_samples) check_num_samples(num_samples_);
  TORCH_CHECK_VALUE(size > 0 || num_samples_ == 0, "RandomSampler: num_samples=", num_samples_,
                    " of a data set without samples");
}

RandomSampler::RandomSampler(int64_t size, std::optional<at::Generator> generator)
    : RandomSampler(size, RandomSamplerOptions{.generator = std::move(generator)}) {}

std::vector<int64_t> RandomSampler::indices() {
  at::Generator generator = source_.begin();
  if (own_seed_) {
    generator = internal::make_generator(static_cast<uint64_t>(internal::draw_seed(generator)));
  }
  if (size_ == 0) return {};
  if (replacement_) {
    // Python draws them 32 at a time, which gives the same numbers.
    return internal::to_vector(
        at::randint(size_, {num_samples_}, generator, at::TensorOptions().dtype(at::kLong)));
  }
  std::vector<int64_t> order;
  for (int64_t left = num_samples_;; left -= size_) {
    // As in Python the last permutation is drawn even if nothing of it is wanted; else the next epoch would
    // differ from Python's.
    auto permutation = internal::random_permutation(size_, generator);
    if (left < size_) {
      order.insert(order.end(), permutation.begin(), permutation.begin() + left);
      return order;
    }
    if (order.empty()) {
      order = std::move(permutation);
    } else {
      order.insert(order.end(), permutation.begin(), permutation.end());
    }
  }
}

StateDict RandomSampler::state_dict() const {
  return source_.state_dict();
}

void RandomSampler::load_state_dict(const StateDict& state) {
  source_.load_state_dict(state, "RandomSampler");
}

SubsetRandomSampler::SubsetRandomSampler(std::vector<int64_t> indices, std::optional<at::Generator> generator)
    : subset_(std::move(indices)), source_(std::move(generator)) {}

std::vector<int64_t> SubsetRandomSampler::indices() {
  auto order = internal::random_permutation(size(), source_.begin());
  for (int64_t& place : order) place = subset_[static_cast<size_t>(place)];
  return order;
}

StateDict SubsetRandomSampler::state_dict() const {
  return source_.state_dict();
}

void SubsetRandomSampler::load_state_dict(const StateDict& state) {
  source_.load_state_dict(state, "SubsetRandomSampler");
}

WeightedRandomSampler::WeightedRandomSampler(const at::Tensor& weights, int64_t num_samples, bool replacement,
                                             std::optional<at::Generator> generator)
    : weights_(weights.to(at::kDouble)),
      num_samples_(num_samples),
      replacement_(replacement),
      source_(std::move(generator)) {
  check_num_samples(num_samples);
  TORCH_CHECK_VALUE(weights.dim() == 1, "weights should be a 1d sequence but given weights have shape ",
                    weights.sizes());
}

WeightedRandomSampler::WeightedRandomSampler(const std::vector<double>& weights, int64_t num_samples,
                                             bool replacement, std::optional<at::Generator> generator)
    : WeightedRandomSampler(at::tensor(weights, at::kDouble), num_samples, replacement,
                            std::move(generator)) {}

std::vector<int64_t> WeightedRandomSampler::indices() {
  return internal::to_vector(at::multinomial(weights_, num_samples_, replacement_, source_.begin()));
}

StateDict WeightedRandomSampler::state_dict() const {
  return source_.state_dict();
}

void WeightedRandomSampler::load_state_dict(const StateDict& state) {
  source_.load_state_dict(state, "WeightedRandomSampler");
}

BatchSampler::BatchSampler(Sampler& sampler, int64_t batch_size, bool drop_last)
    : sampler_(sampler), batch_size_(batch_size), drop_last_(drop_last) {
  TORCH_CHECK_VALUE(batch_size > 0,
                    "batch_size should be a positive integer value, but got batch_size=", batch_size);
}

int64_t BatchSampler::size() const {
  const int64_t samples = sampler_.size();
  return samples / batch_size_ + (!drop_last_ && samples % batch_size_ != 0 ? 1 : 0);
}

std::vector<std::vector<int64_t>> BatchSampler::batches() {
  const auto order = sampler_.indices();
  std::vector<std::vector<int64_t>> answer;
  const auto total = static_cast<int64_t>(order.size());
  for (int64_t first = 0; first < total; first += batch_size_) {
    const int64_t last = std::min(first + batch_size_, total);
    if (drop_last_ && last - first < batch_size_) break;
    answer.emplace_back(order.begin() + first, order.begin() + last);
  }
  return answer;
}

}  // namespace lockstep::data
