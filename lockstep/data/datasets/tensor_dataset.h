#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>

#include <lockstep/data/example.h>

namespace lockstep::data {

namespace internal {

/// The rows of `tensor` at these indices, as a new tensor. Rows in a row come in one copy. Throws
/// c10::IndexError for an index outside [0, tensor.size(0)).
at::Tensor gather_rows(const at::Tensor& tensor, std::span<const int64_t> indices);
at::Tensor row_of(const at::Tensor& tensor, int64_t index);
/// Throws c10::ValueError unless all tensors have the same size(0).
void check_tensors(std::span<const at::Tensor> tensors);

}  // namespace internal

/// Tensors as a map-style data set: sample i is their rows i. TensorDataset of torch/utils/data/dataset.py.
///
///     TensorDataset train(images, labels);        // samples and batches are Example{data, target}
///     TensorDataset(features)                      // at::Tensor (Python: a tuple of one)
///     TensorDataset(images, masks, labels)         // std::array<at::Tensor, 3>: auto& [x, m, y] = batch;
///
/// get_batch() gathers a batch in one pass; get() gives views. Shares the tensors' memory. Any number of
/// threads may read it while no thread writes to the tensors. Tensors on any device.
template <size_t kTensors>
class TensorDataset {
 public:
  using Sample =
      std::conditional_t<kTensors == 1, at::Tensor,
                         std::conditional_t<kTensors == 2, Example, std::array<at::Tensor, kTensors>>>;

  /// Throws c10::ValueError for tensors without dimensions, and for different sizes of the first dimension.
  template <class... Tensors>
  requires(sizeof...(Tensors) == kTensors && (std::is_same_v<std::decay_t<Tensors>, at::Tensor> &&
                                              ...)) explicit TensorDataset(Tensors&&... tensors)
      : tensors_{std::forward<Tensors>(tensors)...} {
    internal::check_tensors(tensors_);
  }

  int64_t size() const { return tensors_[0].size(0); }
  Sample get(int64_t index) const {
    return each([&](const at::Tensor& tensor) { return internal::row_of(tensor, index); });
  }
  Sample get_batch(std::span<const int64_t> indices) const {
    return each([&](const at::Tensor& tensor) { return internal::gather_rows(tensor, indices); });
  }

  const std::array<at::Tensor, kTensors>& tensors() const { return tensors_; }

 private:
  template <class Function>
  Sample each(const Function& function) const {
    if constexpr (kTensors == 1) {
      return function(tensors_[0]);
    } else {
      return [&]<size_t... kPlaces>(std::index_sequence<kPlaces...>) {
        return Sample{function(tensors_[kPlaces])...};
      }
      (std::make_index_sequence<kTensors>());
    }
  }

  std::array<at::Tensor, kTensors> tensors_;
};
template <class... Tensors>
requires(std::is_same_v<std::decay_t<Tensors>, at::Tensor>&&...) TensorDataset(Tensors&&...)
->TensorDataset<sizeof...(Tensors)>;

}  // namespace lockstep::data
