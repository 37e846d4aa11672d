#pragma once

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <lockstep/nn/named_tensor.h>

/// What the wrappers, PipelineStage and Trainer need to know of the models that LibTorch users have:
///
/// | given                                        | ContainedModule<given>     | kept as `.module`       |
/// |----------------------------------------------|----------------------------|-------------------------|
/// | std::shared_ptr<Net>                         | Net                        | std::shared_ptr<Net>    |
/// | a holder: torch::nn::Linear, any TORCH_MODULE| torch::nn::LinearImpl      | its shared_ptr          |
/// | torch::nn::Sequential                        | torch::nn::SequentialImpl  | its shared_ptr          |
/// | torch::nn::AnyModule                         | torch::nn::AnyModule       | a copy, the same module |
/// | torch::jit::Module                           | torch::jit::Module         | a copy, the same module |
///
/// A wrapper is a class template over the contained module's type, with these constructors and this guide:
///
///     explicit Wrapper(typename WrappedModule<T>::Handle module, Options options = {});
///     template <ModuleHolderOf<T> Holder>
///     explicit Wrapper(const Holder& holder, Options options = {});          // holder.ptr()
///
///     template <class Given>
///     Wrapper(Given&&, Options = {}) -> Wrapper<ContainedModule<Given>>;     // Wrapper model(net);
///
/// No container's header is included here; torch::nn::AnyModule is known by what it can do.
namespace lockstep {
namespace internal {

std::vector<NamedTensor> named_tensors(const torch::OrderedDict<std::string, at::Tensor>& tensors);

/// A torch::nn::Module tree over a TorchScript module's own parameters and buffers: the same tensors under
/// the same names, so parameters(), zero_grad() and to() of a module that contains it act on the script
/// module, and train() is passed on. Attributes that the script module gets later are not in it.
std::shared_ptr<torch::nn::Module> mirror_script_module(const torch::jit::Module& module);

/// A type that no forward() returns unless it is asked to.
struct AskedReturnType {};

/// forward<ReturnType>(arguments…) returns what it is asked for, as torch::nn::Sequential's and AnyModule's.
template <class T>
concept ReturnsWhatIsAsked = requires(T& module, const at::Tensor& input) {
  { module.template forward<AskedReturnType>(input) } -> std::same_as<AskedReturnType>;
};

/// torch::nn::AnyModule, and whatever else leads to a module with ptr() without naming its type.
template <class T>
concept ErasedModule = !std::derived_from<T, torch::nn::Module> && requires(const T& module) {
  { module.ptr() } -> std::same_as<std::shared_ptr<torch::nn::Module>>;
  { module.is_empty() } -> std::convertible_to<bool>;
};

template <class T>
struct ContainedModuleOf {};
template <std::derived_from<torch::nn::Module> T>
struct ContainedModuleOf<std::shared_ptr<T>> {
  using type = T;
};
template <class T>
requires requires {
  typename T::ContainedType;
} && std::derived_from<T, torch::nn::ModuleHolder<typename T::ContainedType>>
struct ContainedModuleOf<T> {
  using type = typename T::ContainedType;
};
template <ErasedModule T>
struct ContainedModuleOf<T> {
  using type = T;
};
template <>
struct ContainedModuleOf<torch::jit::Module> {
  using type = torch::jit::Module;
};

}  // namespace internal

/// The T of WrappedModule<T> for something that a wrapper is constructed from. No type (so no deduction) for
/// what cannot be wrapped, such as a module by value, which its wrapper could not share with its owner.
template <class Given>
using ContainedModule = typename internal::ContainedModuleOf<std::remove_cvref_t<Given>>::type;

/// A module holder, such as torch::nn::Linear, of a T.
template <class Holder, class T>
concept ModuleHolderOf = std::derived_from<std::remove_cvref_t<Holder>, torch::nn::ModuleHolder<T>>;

/// How to use a module of type T. All specialisations have these members, all static:
///
///     Handle                          what a wrapper keeps; copies lead to the same module
///     kReturnTypeIsAsked              forward() has the return type that its caller names (at::Tensor unless
///                                     named): call forward<ReturnType>(handle, arguments…)
///     is_empty(handle)                there is no module behind it
///     as_module(handle)               a torch::nn::Module with its parameters, buffers and training mode, to
///                                     register as a submodule; never null
///     named_parameters(handle), named_buffers(handle)
///                                     the module's tensors as they are now, in definition order; a shared
///                                     one as often as it has names. The same TensorImpls that the module has
///     forward(handle, arguments…)     the module's forward; the result is a value, or void
///     train(handle, on), is_training(handle)
///     clone(handle, device)           a deep copy on the device (that of each tensor if none), torch's
///                                     errors where the module can't be cloned
template <class T>
struct WrappedModule {
  static_assert(std::derived_from<T, torch::nn::Module>,
                "the wrapped module must be a torch::nn::Module (in a shared_ptr or a holder such as "
                "torch::nn::Linear), a torch::nn::AnyModule or a torch::jit::Module");
  using Handle = std::shared_ptr<T>;
  static constexpr bool kReturnTypeIsAsked = internal::ReturnsWhatIsAsked<T>;

  static bool is_empty(const Handle& handle) { return handle == nullptr; }
  static std::shared_ptr<torch::nn::Module> as_module(const Handle& handle) { return handle; }
  static std::vector<NamedTensor> named_parameters(const Handle& handle) {
    return internal::named_tensors(handle->named_parameters());
  }
  static std::vector<NamedTensor> named_buffers(const Handle& handle) {
    return internal::named_tensors(handle->named_buffers());
  }
  template <class... Arguments>
  requires(!kReturnTypeIsAsked) static auto forward(const Handle& handle, Arguments&&... arguments) {
    return handle->forward(std::forward<Arguments>(arguments)...);
  }
  template <class ReturnType = at::Tensor, class... Arguments>
  requires kReturnTypeIsAsked static ReturnType forward(const Handle& handle, Arguments&&... arguments) {
    return handle->template forward<ReturnType>(std::forward<Arguments>(arguments)...);
  }
  static void train(const Handle& handle, bool on = true) { handle->train(on); }
  static bool is_training(const Handle& handle) { return handle->is_training(); }
  static Handle clone(const Handle& handle, const std::optional<at::Device>& device = std::nullopt) {
    auto copy = std::dynamic_pointer_cast<T>(handle->clone(device));
    TORCH_CHECK(copy != nullptr, "clone() of ", handle->name(), " made a module of another type");
    return copy;
  }
};

/// A holder means its module.
template <class T>
requires requires {
  typename T::ContainedType;
} && ModuleHolderOf<T, typename T::ContainedType>
struct WrappedModule<T> : WrappedModule<typename T::ContainedType> {
};

/// torch::nn::AnyModule. As ever its arguments must have exactly the types of the contained forward()'s.
template <internal::ErasedModule T>
struct WrappedModule<T> {
  using Handle = T;
  static constexpr bool kReturnTypeIsAsked = true;

  static bool is_empty(const Handle& handle) { return handle.is_empty(); }
  static std::shared_ptr<torch::nn::Module> as_module(const Handle& handle) { return handle.ptr(); }
  static std::vector<NamedTensor> named_parameters(const Handle& handle) {
    return internal::named_tensors(handle.ptr()->named_parameters());
  }
  static std::vector<NamedTensor> named_buffers(const Handle& handle) {
    return internal::named_tensors(handle.ptr()->named_buffers());
  }
  template <class ReturnType = at::Tensor, class... Arguments>
  static ReturnType forward(const Handle& handle, Arguments&&... arguments) {
    Handle same = handle;  // AnyModule's forward() is not const
    return same.template forward<ReturnType>(std::forward<Arguments>(arguments)...);
  }
  static void train(const Handle& handle, bool on = true) { handle.ptr()->train(on); }
  static bool is_training(const Handle& handle) { return handle.ptr()->is_training(); }
  static Handle clone(const Handle& handle, const std::optional<at::Device>& device = std::nullopt) {
    return handle.clone(device);
  }
};

/// torch::jit::Module (torch::jit::script::Module). forward() takes a std::vector<c10::IValue>, a vector and
/// Kwargs, or any values that an IValue can hold; it returns an IValue, and runs the module's forward hooks,
/// as a call does in Python.
template <>
struct WrappedModule<torch::jit::Module> {
  using Handle = torch::jit::Module;
  static constexpr bool kReturnTypeIsAsked = false;

  static bool is_empty(const Handle& handle);
  static std::shared_ptr<torch::nn::Module> as_module(const Handle& handle) {
    return internal::mirror_script_module(handle);
  }
  static std::vector<NamedTensor> named_parameters(const Handle& handle);
  static std::vector<NamedTensor> named_buffers(const Handle& handle);
  static c10::IValue forward(const Handle& handle, std::vector<c10::IValue> arguments);
  static c10::IValue forward(const Handle& handle, std::vector<c10::IValue> arguments,
                             const torch::jit::Kwargs& keywords);
  template <class... Arguments>
  requires(std::constructible_from<c10::IValue, Arguments>&&...) static c10::IValue
      forward(const Handle& handle, Arguments&&... arguments) {
    std::vector<c10::IValue> values;
    values.reserve(sizeof...(Arguments));
    (values.emplace_back(std::forward<Arguments>(arguments)), ...);
    return forward(handle, std::move(values));
  }
  static void train(const Handle& handle, bool on = true);
  static bool is_training(const Handle& handle) { return handle.is_training(); }
  static Handle clone(const Handle& handle, const std::optional<at::Device>& device = std::nullopt);
};

namespace internal {

/// The handle of what a wrapper is constructed from: a holder's ptr(), or a copy of what was given.
template <class Given>
typename WrappedModule<ContainedModule<Given>>::Handle handle_of(const Given& given) {
  if constexpr (ModuleHolderOf<Given, ContainedModule<Given>>) {
    return given.ptr();
  } else {
    return given;
  }
}

}  // namespace internal

/// forward() and operator() of a wrapper whose arguments and result are the module's own. The wrapper derives from it publicly,
/// has the module as `module`, and befriends it for
///
///     template <class Call, class... Arguments>
///     auto run(Call&& call, Arguments&&... arguments);   // call(arguments…) is the module's forward
template <class Wrapper, class Wrapped>
class ForwardOfWrapper {
  using Traits = WrappedModule<Wrapped>;

 public:
  /// The module's forward with the wrapper's work around it. For modules whose forward() is asked for its return type
  /// (Sequential, AnyModule): forward<ReturnType>(arguments…), at::Tensor unless named.
  template <class... Arguments>
  requires(!Traits::kReturnTypeIsAsked) auto forward(Arguments&&... arguments) {
    return wrapper().run(
        [this](auto&&... given) {
          return Traits::forward(wrapper().module, std::forward<decltype(given)>(given)...);
        },
        std::forward<Arguments>(arguments)...);
  }
  template <class ReturnType = at::Tensor, class... Arguments>
  requires Traits::kReturnTypeIsAsked ReturnType forward(Arguments&&... arguments) {
    return wrapper().run(
        [this](auto&&... given) {
          return Traits::template forward<ReturnType>(wrapper().module,
                                                      std::forward<decltype(given)>(given)...);
        },
        std::forward<Arguments>(arguments)...);
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

 private:
  Wrapper& wrapper() { return static_cast<Wrapper&>(*this); }
};

}  // namespace lockstep
