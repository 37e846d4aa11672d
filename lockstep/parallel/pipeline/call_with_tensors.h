#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/base/tensor_tree.h>
#include <lockstep/nn/wrapped_module.h>

/// Calls what takes some tensors, or a list of them, with the tensors of a list; for stages and losses, whose inputs come from
/// other ranks.
namespace lockstep::pipeline::internal {

using Tensors = std::vector<at::Tensor>;

inline constexpr size_t kMostArguments = 8;
template <size_t>
using TensorArgument = const at::Tensor&;

template <class Call, size_t... kIndex>
consteval bool takes(std::index_sequence<kIndex...> /*count*/) {
  return std::invocable<Call&, TensorArgument<kIndex>...>;
}
template <class Call, size_t... kCount>
consteval bool takes_some(std::index_sequence<kCount...> /*counts*/) {
  return (takes<Call>(std::make_index_sequence<kCount>()) || ...);
}

template <class Result>
Tensors tensors_in(Result&& result) {
  if constexpr (std::same_as<std::remove_cvref_t<Result>, Tensors>) {
    return std::forward<Result>(result);
  } else {
    static_assert(can_find_tensors<Result>,
                  "a pipeline's stage returns a tensor, or what tensor_tree.h finds tensors in");
    Tensors tensors;
    for_each_tensor(std::as_const(result), [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
    return tensors;
  }
}

template <class Call, size_t... kIndex>
Tensors call_with_each(Call& call, const Tensors& inputs, std::index_sequence<kIndex...> /*count*/) {
  return tensors_in(call(inputs[kIndex]...));
}

/// `call`: takes a std::vector<at::Tensor>, or 0 to 8 tensors, maybe of several numbers.
template <class Call, size_t kCount = 0>
Tensors call_with_tensors(Call& call, const Tensors& inputs) {
  if constexpr (std::invocable<Call&, const Tensors&>) {
    return tensors_in(call(inputs));
  } else if constexpr (kCount > kMostArguments) {
    static_assert(takes_some<Call>(std::make_index_sequence<kMostArguments + 1>()),
                  "a pipeline's stage takes a vector of tensors, or up to 8 tensors");
    C10_THROW_ERROR(ValueError,
                    c10::str("it does not take ", inputs.size(),
                             " tensors: a stage gets the pipeline's inputs, or what other stages send it"));
  } else {
    if constexpr (takes<Call>(std::make_index_sequence<kCount>())) {
      if (inputs.size() == kCount) return call_with_each(call, inputs, std::make_index_sequence<kCount>());
    }
    return call_with_tensors<Call, kCount + 1>(call, inputs);
  }
}

/// Whether it takes a list of outputs and a target. Holders of modules (torch::nn::CrossEntropyLoss) can't be asked without an
/// error of the compiler; they take single tensors.
template <class Call>
consteval bool takes_outputs_and_target() {
  if constexpr (requires { typename ContainedModule<Call>; }) {
    return false;
  } else {
    return std::invocable<Call&, const Tensors&, const at::Tensor&>;
  }
}

/// A module's forward().
template <class Module>
struct ModuleCall {
  using Traits = WrappedModule<Module>;
  typename Traits::Handle handle;

  template <class... Arguments>
  requires requires(Module& module, Arguments&&... arguments) {
    module.forward(std::forward<Arguments>(arguments)...);
  }
  auto operator()(Arguments&&... arguments) {
    return Traits::forward(handle, std::forward<Arguments>(arguments)...);
  }
};
/// Whose forward() is asked for its return type, and TorchScript's: how many arguments they take shows at the call.
template <class Module>
requires(WrappedModule<Module>::kReturnTypeIsAsked ||
         std::same_as<Module, torch::jit::Module>) struct ModuleCall<Module> {
  using Traits = WrappedModule<Module>;
  typename Traits::Handle handle;

  template <class... Arguments>
  requires(sizeof...(Arguments) > 0 && sizeof...(Arguments) <= 4 &&
           (std::same_as<std::remove_cvref_t<Arguments>, at::Tensor> && ...)) auto
  operator()(Arguments&&... arguments) {
    return Traits::forward(handle, std::forward<Arguments>(arguments)...);
  }
};

}  // namespace lockstep::pipeline::internal
