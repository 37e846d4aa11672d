#pragma once

#include <functional>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

namespace lockstep::swa_utils {
namespace internal {

/// While it lives, the model is in training mode, and its BatchNorm layers (1d, 2d, 3d, SyncBatchNorm) take
/// the plain mean of all batches from now on. Its end restores mode and momenta.
class BatchNormRecount {
 public:
  explicit BatchNormRecount(torch::nn::Module& model);
  BatchNormRecount(const BatchNormRecount&) = delete;
  BatchNormRecount& operator=(const BatchNormRecount&) = delete;
  ~BatchNormRecount();
  /// Whether there is a BatchNorm layer; without one nothing was changed.
  explicit operator bool() const { return !restore_.empty(); }

 private:
  torch::nn::Module& model_;
  bool was_training_;
  std::vector<std::function<void()>> restore_;
};

/// The input among what a loader gives: a tensor, `data` of a data::Example, or the first of a pair, tuple or
/// list.
template <class Batch>
at::Tensor input_of(const Batch& batch) {
  if constexpr (std::is_convertible_v<const Batch&, at::Tensor>) {
    return batch;
  } else if constexpr (requires { batch.data.sizes(); }) {
    return batch.data;
  } else if constexpr (requires { std::get<0>(batch); }) {
    return std::get<0>(batch);
  } else {
    return batch.at(0);
  }
}

template <class Model>
torch::nn::Module& module_of(Model& model) {
  if constexpr (std::is_base_of_v<torch::nn::Module, Model>) {
    return model;
  } else if constexpr (requires { model.ptr(); }) {
    return *model.ptr();
  } else {
    return *model;
  }
}

}  // namespace internal

/// Computes the running statistics of a model's BatchNorm layers anew, by one pass over `loader` in training
/// mode without gradients: for an AveragedModel, whose weights no batch has been through. `model`: any
/// module, shared pointer or holder that takes one tensor. `device`: where to bring the batches to.
///
/// Each rank passes its own batches and gets its own statistics, as in Python. Give all ranks the same data,
/// or average the buffers afterwards. torch/optim/swa_utils.py.
template <class Loader, class Model>
void update_bn(Loader&& loader, Model& model, const std::optional<at::Device>& device = std::nullopt) {
  const at::NoGradGuard no_grad;
  const internal::BatchNormRecount recount(internal::module_of(model));
  if (!recount) return;
  for (auto&& batch : loader) {
    at::Tensor input = internal::input_of(batch);
    if (device) input = input.to(*device);
    if constexpr (requires { model.forward(input); }) {
      model.forward(input);
    } else {
      model->forward(input);
    }
  }
}

}  // namespace lockstep::swa_utils
