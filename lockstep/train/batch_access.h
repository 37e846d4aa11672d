#pragma once

#include <cstdint>
#include <type_traits>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/base/tensor_tree.h>
#include <lockstep/data/example.h>

namespace lockstep {

/// What the Trainer must know of a batch: how many samples it has, and how to take a part of it. This one is
/// for everything in which tensor_tree.h finds tensors (Example, tensors, pairs, vectors, maps, …): the
/// first dimension of the first tensor counts the samples, and a part is that part of each tensor with as
/// many. Specialise it for batches with other things that come one for each sample:
///
///     template <>
///     struct lockstep::BatchAccess<Documents> {
///       static int64_t samples(const Documents& batch);
///       static Documents part(const Documents& batch, int64_t begin, int64_t length);
///     };
template <class Batch>
struct BatchAccess {
  static_assert(can_find_tensors<Batch>,
                "the Trainer finds no tensors in this type of batch; give it a visit_tensors() (see "
                "lockstep/base/tensor_tree.h), or specialise lockstep::BatchAccess for it");

  /// Throws c10::ValueError for a batch without a tensor of one or more dimensions.
  static int64_t samples(const Batch& batch) {
    int64_t count = -1;
    for_each_tensor(batch, [&](const at::Tensor& tensor) {
      if (count < 0 && tensor.dim() > 0) count = tensor.size(0);
    });
    TORCH_CHECK_VALUE(count >= 0,
                      "a batch holds no tensor with a first dimension that counts its samples; specialise "
                      "lockstep::BatchAccess for it");
    return count;
  }

  /// `length` samples from `begin` on, as views.
  static Batch part(const Batch& batch, int64_t begin, int64_t length) {
    const int64_t all = samples(batch);
    Batch copy = batch;
    for_each_owned_tensor(copy, [&](at::Tensor& tensor) {
      if (tensor.dim() > 0 && tensor.size(0) == all) tensor = tensor.narrow(0, begin, length);
    });
    return copy;
  }
};

}  // namespace lockstep
