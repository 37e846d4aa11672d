#include <algorithm>
#include <array>
#include <vector>

#include <lockstep/collectives/algorithms/hosts/arithmetic.h>

namespace lockstep::collectives::internal::algorithms::hosts {

Arithmetic::Arithmetic(const Signature& signature, int ranks) : ranks_(ranks) {
  const at::ScalarType type = signature.real_dtype();
  const auto operation = static_cast<ReduceOperation>(signature.operation);
  const bool average = operation == ReduceOperation::kAverage;
  kernels_ = &reduce_kernels(type, operation);
  of_partials_ = average ? &reduce_kernels(type, ReduceOperation::kSum) : kernels_;
  partial_ending_ = type == at::kHalf ? kernels_ : of_partials_;
  last_ending_ = type == at::kHalf ? of_partials_ : kernels_;
}

/// Folds inputs as one of the kernels begins and the other ends.
void Arithmetic::fold(void* output, const void* const* inputs, size_t n_inputs, size_t count,
                      const ReduceKernels& beginning, const ReduceKernels& ending) const {
  if (count == 0) return;
  if (&beginning == of_partials_ && &ending == of_partials_) {
    return of_partials_->reduce(&output, 1, inputs, n_inputs, count);
  }
  if (kernels_->accumulator_size == kernels_->element_size) {
    if (&ending == of_partials_) return beginning.partial(output, inputs, n_inputs, ranks_, count);
    return ending.finish(&output, 1, inputs, n_inputs, ranks_, count);
  }
  // By way of an accumulator that stays in the first-level cache.
  constexpr size_t kBlock = 2048;
  alignas(64) std::array<float, kBlock> accumulator;
  std::vector<const void*> at(inputs, inputs + n_inputs);
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t length = std::min(kBlock, count - begin);
    const size_t offset = begin * kernels_->element_size;
    for (size_t i = 0; i < n_inputs; ++i) at[i] = static_cast<const std::byte*>(inputs[i]) + offset;
    beginning.partial(accumulator.data(), at.data(), n_inputs, ranks_, length);
    const void* const folded = accumulator.data();
    void* const to = static_cast<std::byte*>(output) + offset;
    ending.finish(&to, 1, &folded, 1, ranks_, length);
  }
}

}  // namespace lockstep::collectives::internal::algorithms::hosts
