#pragma once

#include <concepts>
#include <vector>

#include <lockstep/nn/model_tensors.h>
#include <lockstep/nn/named_tensor.h>
#include <lockstep/train/pipelined_model.h>

// What the Trainer asks of a model, of whichever kind it is.
namespace lockstep::train {

/// Whether it averages its gradients over ranks.
template <class Model>
inline constexpr bool kSynchronises = requires(Model& model) {
  model.no_sync();
};

/// Whether all ranks must call its forward equally often.
template <class Model>
bool has_collective_forward(const Model& model) {
  if constexpr (requires { model.gathers(); }) {
    return model.gathers();
  } else {
    return false;
  }
}

/// What computes in validation: not the wrapper, whose forward may communicate, as ranks may have unequally many batches.
template <class Model>
auto& evaluated(Model& model) {
  if constexpr (kSynchronises<Model> && !ShardedModel<Model> && requires { *model.module; }) {
    return *model.module;
  } else {
    return model;
  }
}

template <class Model>
std::vector<NamedTensor> buffers_of(const Model& model) {
  if constexpr (std::same_as<Model, PipelinedModel>) {
    return model.named_buffers();
  } else {
    std::vector<NamedTensor> buffers;
    for (const auto& item : model.named_buffers()) buffers.emplace_back(item.key(), item.value());
    return buffers;
  }
}

}  // namespace lockstep::train
