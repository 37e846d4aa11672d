#pragma once

#include <concepts>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/nn/named_tensor.h>
#include <lockstep/nn/wrapped_module.h>

namespace lockstep {

template <class T>
class DistributedDataParallel;
template <class T>
class DataParallel;
template <class T>
class FullyShardedDataParallel;

/// A model's parameters and buffers as Python's state_dict() lists them: dotted names, in definition order; a
/// tensor that has two names stands there twice. They are the model's own tensors.
struct ModelTensors {
  std::string name;  ///< of the model's class, for messages
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
};

namespace internal {

template <class T>
void is_wrapper(const DistributedDataParallel<T>&);
template <class T>
void is_wrapper(const DataParallel<T>&);
template <class T>
concept WrapperModule = requires(const T& model) {
  is_wrapper(model);
};

template <class T>
void is_sharded(const FullyShardedDataParallel<T>&);

ModelTensors tensors_of_module(const torch::nn::Module& module);

}  // namespace internal

/// A model: a torch::nn::Module, a std::shared_ptr to one, a holder (torch::nn::Linear), an AnyModule, a
/// torch::jit::Module, or a wrapper (DistributedDataParallel, DataParallel, AveragedModel), itself or behind
/// a pointer.
template <class T>
concept ModelType = std::derived_from<std::remove_cvref_t<T>, torch::nn::Module> || requires {
  typename ContainedModule<T>;
};

/// FullyShardedDataParallel: no rank has the whole of its parameters to itself, so its states come from it.
template <class T>
concept ShardedModel = requires(const T& model) {
  internal::is_sharded(model);
};

/// The tensors that the model has now. DistributedDataParallel and DataParallel have the names of the module
/// that they wrap, without Python's "module."; AveragedModel has it, beside "n_averaged", as in Python.
/// Throws c10::ValueError for an empty pointer or holder.
template <ModelType Model>
ModelTensors model_tensors(const Model& model) {
  static_assert(!ShardedModel<Model>,
                "a FullyShardedDataParallel's states are its full_state_dict() and full_optim_state_dict()");
  if constexpr (internal::WrapperModule<Model>) {
    return model_tensors(model.module);
  } else if constexpr (std::derived_from<Model, torch::nn::Module>) {
    return internal::tensors_of_module(model);
  } else if constexpr (std::same_as<Model, torch::jit::Module>) {
    using Script = WrappedModule<torch::jit::Module>;
    TORCH_CHECK_VALUE(!Script::is_empty(model), "the model is empty");
    return {"ScriptModule", Script::named_parameters(model), Script::named_buffers(model)};
  } else if constexpr (requires { model.is_empty(); }) {  // holders and AnyModule
    TORCH_CHECK_VALUE(!model.is_empty(), "the model is empty");
    return model_tensors(*model.ptr());
  } else {
    TORCH_CHECK_VALUE(model != nullptr, "the model is empty");
    return model_tensors(*model);
  }
}

/// A function that answers model_tensors() later. Pointers, holders and scripts are kept; a module itself is
/// referred to, and must outlive the function.
template <ModelType Model>
std::function<ModelTensors()> model_tensors_later(const Model& model) {
  if constexpr (std::derived_from<Model, torch::nn::Module>) {
    return [&model] { return model_tensors(model); };
  } else {
    return [model] { return model_tensors(model); };
  }
}

}  // namespace lockstep
