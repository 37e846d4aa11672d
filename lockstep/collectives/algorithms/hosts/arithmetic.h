#pragma once

#include <cstddef>
#include <cstdint>

#include <lockstep/collectives/algorithms/signature.h>
#include <lockstep/collectives/kernels/reduce_kernels.h>

namespace lockstep::collectives::internal::algorithms::hosts {

/// The folds of a large reduction over hosts. Partials have the tensor's element type.
///
/// An average of all ranks is begun where the host's partial is made, and divided where the last fold is made: see
/// ReduceKernels. That of float16 is divided where the host's partial is made, for this is folded in float, and the others
/// round each of their results to float16.
class Arithmetic {
 public:
  Arithmetic(const Signature& signature, int ranks);

  size_t element_size() const { return kernels_->element_size; }
  /// By which the sum of all inputs is divided.
  int64_t divisor() const { return kernels_ == of_partials_ ? 1 : ranks_; }

  /// The partial of the members of one host. Overlaps no input.
  void partial(void* output, const void* const* inputs, size_t n_inputs, size_t count) const {
    fold(output, inputs, n_inputs, count, *kernels_, *partial_ending_);
  }
  /// Makes one partial of two. The output may be one of them.
  void combine(void* output, const void* first, const void* second, size_t count) const {
    const void* const inputs[] = {first, second};
    fold(output, inputs, 2, count, *of_partials_, *of_partials_);
  }
  /// Makes the result of the partials of all hosts. The output may be one of them.
  void finish(void* output, const void* const* partials, size_t n_partials, size_t count) const {
    fold(output, partials, n_partials, count, *of_partials_, *last_ending_);
  }
  /// Makes the result of a sum of partials that was made elsewhere: divides for an average, where finish() does.
  void divide(void* sum, size_t count) const {
    if (last_ending_ != of_partials_) fold(sum, &sum, 1, count, *of_partials_, *last_ending_);
  }

 private:
  void fold(void* output, const void* const* inputs, size_t n_inputs, size_t count,
            const ReduceKernels& beginning, const ReduceKernels& ending) const;

  const ReduceKernels* kernels_;
  const ReduceKernels* of_partials_;  // the same, but for averages sums
  const ReduceKernels* partial_ending_;
  const ReduceKernels* last_ending_;
  int64_t ranks_;
};

}  // namespace lockstep::collectives::internal::algorithms::hosts
