#pragma once

#include <concepts>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/nn/model_tensors.h>
#include <lockstep/nn/named_tensor.h>
#include <lockstep/parallel/ddp/state_sync.h>
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

/// All ranks get the buffers that the next training step will begin with: rank 0's of `group`, if there is one.
template <class Model>
void share_buffers(Model& model, const ProcessGroup& group) {
  if constexpr (requires { model.will_sync_module_buffers(); }) {
    if (group && model.will_sync_module_buffers()) {
      broadcast_coalesced(model.core().current_buffers(), group);
    }
  } else if constexpr (requires { model.share_buffers(); }) {
    model.share_buffers();
  }
}

/// What clips gradients by their norm, for a model whose parameters() do not have the same on all ranks; null for others.
template <class Model>
std::function<at::Tensor(double max_norm)> clipping_of(Model& model) {
  if constexpr (std::same_as<Model, PipelinedModel> || ShardedModel<Model>) {
    return [&model](double max_norm) { return model.clip_grad_norm_(max_norm); };
  } else if constexpr (requires { model.core().averaged_parameters(); }) {
    return
        [&model](double max_norm) { return clip_grad_norm_(model.core().averaged_parameters(), max_norm); };
  } else {
    return {};
  }
}

/// A step that has begun is not finished. With mixed precision the parameters may hold what only forward and backward shall
/// see.
template <class Model>
void abandon_step(Model& model) {
  if constexpr (requires { model.core().abandon(); }) model.core().abandon();
}

/// Averages over `group` from now on. Throws c10::Error for a model of which each rank has a part.
template <class Model>
void use_group(Model& model, const ProcessGroup& group) {
  if constexpr (std::same_as<Model, PipelinedModel>) {
    TORCH_CHECK(false,
                "Trainer: a pipeline can't go on in another group, for the stages of the ranks that are gone "
                "are lost; start again from a checkpoint");
  } else if constexpr (ShardedModel<Model>) {
    TORCH_CHECK(false,
                "Trainer: a FullyShardedDataParallel can't go on in another group, for the rows of the ranks "
                "that are gone are lost; start again from a checkpoint");
  } else if constexpr (kSynchronises<Model>) {
    model.update_process_group(group);
  }
}

}  // namespace lockstep::train
