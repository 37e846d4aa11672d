#include <numeric>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>
#include <c10/util/Exception.h>

#include <lockstep/data/internal/random.h>
#include <lockstep/data/sampler.h>

namespace lockstep::data {
namespace internal {

at::Generator make_generator(uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

std::vector<int64_t> random_permutation(int64_t size, const at::Generator& generator) {
  const at::Tensor permutation = at::randperm(size, generator, at::TensorOptions().dtype(at::kLong));
  const int64_t* first = permutation.const_data_ptr<int64_t>();
  return {first, first + size};
}

int64_t draw_seed(const std::optional<at::Generator>& generator) {
  return at::empty({}, at::TensorOptions().dtype(at::kLong)).random_(generator).item<int64_t>();
}

}  // namespace internal

SequentialSampler::SequentialSampler(int64_t size) : size_(size) {
  TORCH_CHECK_VALUE(size >= 0, "SequentialSampler: size is ", size, "; a data set has 0 or more samples");
}

std::vector<int64_t> SequentialSampler::indices() {
  std::vector<int64_t> order(static_cast<size_t>(size_));
  std::iota(order.begin(), order.end(), int64_t{0});
  return order;
}

RandomSampler::RandomSampler(int64_t size, std::optional<at::Generator> generator)
    : size_(size), generator_(std::move(generator)) {
  TORCH_CHECK_VALUE(size >= 0, "RandomSampler: size is ", size, "; a data set has 0 or more samples");
}

std::vector<int64_t> RandomSampler::indices() {
  if (!generator_) {
    const auto seed = static_cast<uint64_t>(internal::draw_seed(std::nullopt));
    return internal::random_permutation(size_, internal::make_generator(seed));
  }
  auto order = internal::random_permutation(size_, *generator_);
  // Python draws a further permutation at the end of each epoch, for the num_samples % size samples that are
  // none here; without it the next epoch would differ from Python's.
  internal::random_permutation(size_, *generator_);
  return order;
}

}  // namespace lockstep::data
