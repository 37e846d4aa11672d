#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <lockstep/base/tensor_tree.h>
#include <lockstep/optim/autocast.h>
#include <lockstep/train/batch_access.h>
#include <lockstep/train/pipelined_model.h>
#include <lockstep/train/trainer_core.h>

namespace lockstep {

/// What a Trainer calls for the loss of a batch of `Batch`.
template <class Function, class Model, class Batch>
concept TrainerFunction = std::invocable<Function&, Model&, const Batch&>;

namespace train {

/// Calls a Trainer's loss function: with the batch on the model's device, within autocast where that is wanted.
class LossComputation {
 public:
  LossComputation(at::Device device, std::optional<at::ScalarType> autocast_dtype)
      : device_(device), autocast_dtype_(autocast_dtype) {}

  template <class Function, class Model, class Batch>
  StepOutput run(Function& function, Model& model, const Batch& batch) const {
    if constexpr (std::copy_constructible<Batch>) {
      // Here, so that no more is on the device than what is computed on, and a lack of memory for it is one
      // of the step.
      if (!device_.is_cpu()) return compute(function, model, on_device(batch));
    }
    return compute(function, model, batch);
  }

  /// For a pipeline: calls the function, on the rank of the last stage, with each of the batch's micro-batches,
  /// and then `use`. What it returns refers to all three.
  template <class Function, class Batch, class Use>
  auto of_rows(Function& function, const Batch& batch, const Use& use) const {
    return [self = *this, &function, &batch, &use](const std::vector<at::Tensor>& outputs, int64_t begin,
                                                   int64_t length) {
      Batch rows = BatchAccess<Batch>::part(batch, begin, length);
      if (!self.device_.is_cpu()) rows = self.on_device(std::move(rows));
      PipelineOutput model(inputs_of(rows), outputs);
      return use(self.compute(function, model, rows), length);
    };
  }

 private:
  /// What lies behind pointers is not the batch's own and stays where it is.
  template <class Batch>
  Batch on_device(Batch batch) const {
    for_each_owned_tensor(batch, [&](at::Tensor& tensor) {
      tensor = tensor.to(tensor.options().device(device_), /*non_blocking=*/true);
    });
    return batch;
  }

  template <class Function, class Model, class Batch>
  StepOutput compute(Function& function, Model& model, const Batch& batch) const {
    constexpr bool kFits = TrainerFunction<Function, Model, Batch>;
    static_assert(kFits,
                  "Trainer: loss_of can't be called with this model and a const batch. It gets the model in "
                  "training, what a DistributedDataParallel wraps in validation; a generic lambda takes "
                  "both: [](auto& model, const auto& batch)");
    if constexpr (!kFits) {
      return {};  // so that there is no other error
    } else {
      std::optional<Autocast> scope;
      if (autocast_dtype_) scope.emplace(device_.type(), AutocastOptions{.dtype = autocast_dtype_});
      auto output = function(model, batch);
      if constexpr (std::convertible_to<decltype(output), at::Tensor>) {
        return {.loss = std::move(output)};
      } else {
        return output;
      }
    }
  }

  at::Device device_;
  std::optional<at::ScalarType> autocast_dtype_;
};

}  // namespace train
}  // namespace lockstep
