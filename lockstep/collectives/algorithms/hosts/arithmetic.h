#pragma once

#include <cstddef>
#include <cstdint>

#include <lockstep/collectives/algorithms/signature.h>
#include <lockstep/collectives/kernels/reduce_kernels.h>

namespace lockstep::algorithms::hosts {

/// The folds of a large reduction over hosts. Partials have the tensor's element type.
///
/// An average is divided where the last fold is made, by the number of all ranks. That of float16 is divided where
/// the host's partial is made, which is folded in float: a sum of float16 may be infinite though the average is not.
class Arithmetic {
 public:
  Arithmetic(const Signature& signature, int ranks);

  size_t element_size() const { return kernels_->element_size; }

  /// The partial of the members of one host.
  void partial(void* output, const void* const* inputs, size_t n_inputs, size_t count) const {
    fold(output, inputs, n_inputs, count, partial_divisor_);
  }
  /// Makes one partial of two. The output may be one of them.
  void combine(void* output, const void* first, const void* second, size_t count) const {
    const void* const inputs[] = {first, second};
    fold(output, inputs, 2, count, 1);
  }
  /// Makes the result of the partials of all hosts. The output may be one of them.
  void finish(void* output, const void* const* partials, size_t n_partials, size_t count) const {
    fold(output, partials, n_partials, count, last_divisor_);
  }
  /// Makes the result of a sum that was made elsewhere: divides for an average, where finish() does.
  void divide(void* sum, size_t count) const {
    if (last_divisor_ > 1) fold(sum, &sum, 1, count, last_divisor_);
  }

 private:
  void fold(void* output, const void* const* inputs, size_t n_inputs, size_t count, int64_t divisor) const;

  const ReduceKernels* kernels_;
  const ReduceKernels* undivided_;  // the same, but for averages sums
  int64_t partial_divisor_ = 1;
  int64_t last_divisor_ = 1;
};

}  // namespace lockstep::algorithms::hosts
