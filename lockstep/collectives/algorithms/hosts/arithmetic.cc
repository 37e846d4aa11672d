#include <algorithm>
#include <array>
#include <vector>

#include <lockstep/collectives/algorithms/hosts/arithmetic.h>

namespace lockstep::algorithms::hosts {

Arithmetic::Arithmetic(const Signature& signature, int ranks) {
  const at::ScalarType type = signature.real_dtype();
  const auto operation = static_cast<ReduceOperation>(signature.operation);
  const bool average = operation == ReduceOperation::kAverage;
  kernels_ = &reduce_kernels(type, operation);
  undivided_ = average ? &reduce_kernels(type, ReduceOperation::kSum) : kernels_;
  if (average) (type == at::kHalf ? partial_divisor_ : last_divisor_) = ranks;
}

void Arithmetic::fold(void* output, const void* const* inputs, size_t n_inputs, size_t count,
                      int64_t divisor) const {
  if (count == 0) return;
  if (divisor == 1) return undivided_->reduce(&output, 1, inputs, n_inputs, count);
  if (kernels_->accumulator_size == kernels_->element_size) {
    return kernels_->finish(&output, 1, inputs, n_inputs, divisor, count);
  }
  // By way of an accumulator that stays in the first-level cache.
  constexpr size_t kBlock = 2048;
  alignas(64) std::array<float, kBlock> accumulator;
  std::vector<const void*> at(inputs, inputs + n_inputs);
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t length = std::min(kBlock, count - begin);
    const size_t offset = begin * kernels_->element_size;
    for (size_t i = 0; i < n_inputs; ++i) at[i] = static_cast<const std::byte*>(inputs[i]) + offset;
    kernels_->partial(accumulator.data(), at.data(), n_inputs, length);
    const void* const folded = accumulator.data();
    void* const to = static_cast<std::byte*>(output) + offset;
    kernels_->finish(&to, 1, &folded, 1, divisor, length);
  }
}

}  // namespace lockstep::algorithms::hosts
