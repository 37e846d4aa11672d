#pragma once

#include <cstddef>
#include <vector>

namespace lockstep {

/// What the assignment must know of a parameter.
struct ParameterSize {
  size_t bytes;
  int kind;  // parameters of different kinds (dtype, device) never share a bucket
  bool alone = false;
};

/// Puts parameters into buckets in the given order, per kind: a bucket is closed as soon as it holds at least
/// its cap; the i-th bucket of each kind has caps[i] bytes, those beyond the list its last. Buckets come back
/// in the order in which they were begun. `order` holds indices into `sizes`, each once. A pure function, so
/// that all ranks get the same answer. torch/csrc/distributed/c10d/reducer.cpp,
/// compute_bucket_assignment_by_size.
std::vector<std::vector<size_t>> assign_buckets(const std::vector<ParameterSize>& sizes,
                                                const std::vector<size_t>& order,
                                                const std::vector<size_t>& caps);

}  // namespace lockstep
