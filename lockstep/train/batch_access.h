#pragma once

#include <cstdint>
#include <vector>

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
///       static std::vector<at::Tensor> inputs(const Documents& batch);  // for pipelines alone
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

  /// What a pipeline's first stage gets, with a row for each sample: the first tensor.
  static std::vector<at::Tensor> inputs(const Batch& batch) {
    std::vector<at::Tensor> first;
    for_each_tensor(batch, [&](const at::Tensor& tensor) {
      if (first.empty()) first.push_back(tensor);
    });
    return first;
  }
};

namespace train {

template <class Batch>
std::vector<at::Tensor> inputs_of(const Batch& batch) {
  if constexpr (requires { BatchAccess<Batch>::inputs(batch); }) {
    return BatchAccess<Batch>::inputs(batch);
  } else {
    TORCH_CHECK_VALUE(
        false,
        "Trainer: lockstep::BatchAccess does not say what a pipeline's first stage gets of this type "
        "of batch; give its specialisation a static function inputs(batch)");
  }
}

/// A number that differs, most likely, where batches do: of each tensor's kind, sizes and first bytes. For comparing what the
/// ranks of a pipeline have, which must be the same.
int64_t fingerprint_of(const std::vector<at::Tensor>& tensors);
template <class Batch>
int64_t fingerprint_of(const Batch& batch) {
  std::vector<at::Tensor> tensors;
  if constexpr (can_find_tensors<Batch>) {
    for_each_tensor(batch, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  } else {
    tensors = inputs_of(batch);
  }
  return fingerprint_of(tensors);
}

}  // namespace train

}  // namespace lockstep
