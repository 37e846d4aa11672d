#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <lockstep/base/tensor_tree.h>
#include <lockstep/nn/wrapped_module.h>
#include <lockstep/parallel/data_parallel/internal/parallel_apply.h>
#include <lockstep/parallel/data_parallel/internal/scatter_gather.h>

namespace lockstep {

/// torch.nn.DataParallel's options.
struct DataParallelOptions {
  /// One replica each; the module lies on the first. Empty: all CUDA devices, and where there are none, the
  /// module itself without replicas. The CPU may be named several times.
  std::vector<at::Device> device_ids = {};
  /// Where the output goes; device_ids[0] unless told.
  std::optional<at::Device> output_device = std::nullopt;
  /// The dimension along which arguments are split and outputs are put together.
  int64_t dim = 0;
  /// That many replicas on the CPU, in place of device_ids.
  int64_t num_replicas = 0;
};

/// One process computes each batch on several replicas of a module, in threads: every tensor among the
/// arguments is split along `dim`, other arguments go to all, and the outputs are put together again. In
/// backward the replicas' parts run in parallel too, and the module's gradients are their sums, in the order
/// of the replicas. So a training computes what the module alone would, but for batch statistics. Mostly
/// DistributedDataParallel is the better choice, on one machine too; docs/data_parallel.md says when not.
///
///     auto net = std::make_shared<Net>();
///     lockstep::DataParallel model(net, {.num_replicas = 4});     // or {.device_ids = {{at::kCUDA, 0},
///     {at::kCUDA, 1}}} torch::optim::SGD optimizer(model.parameters(), 0.1); loss(model(batch.data),
///     batch.target).backward();           // the gradients are in net's parameters
///
/// Takes what DistributedDataParallel takes (wrapped_module.h); the module must have a clone(): subclass
/// torch::nn::Cloneable. Arguments and outputs are tensors and standard containers of them, c10::IValues,
/// structs with a visit_tensors() (tensor_tree.h), and plain data, which must be equal in all outputs.
/// Batches smaller than the number of replicas use fewer of them, as torch::chunk splits; a batch that makes
/// one chunk is computed by the module itself.
///
/// The replicas are made once. On the CPU they share the parameters' memory, elsewhere the values are copied
/// for each forward. They follow in-place changes, to(), load(), train() and eval(), requires_grad, and are
/// made anew when submodules or tensors come or go; after other changes (an option of a layer, say) call
/// replicate(). The first replica's buffers are the module's, the other replicas' changes of theirs are lost.
/// What else a forward changes in its module happens in a replica.
///
/// Called from one thread at a time; backward may run in any thread, also when this object is gone. An error
/// in a replica says which. Random operations on the CPU share the default generator, which is safe, but
/// which replica draws first is open. torch/nn/parallel/data_parallel.py; unlike torch it refuses tensors
/// that make different numbers of chunks.
template <class T>
class DataParallel : public torch::nn::Module {
  using Trait = WrappedModule<T>;
  static constexpr bool kIsScript = std::same_as<T, torch::jit::Module>;
  template <class... Arguments>
  using Output =
      decltype(Trait::forward(std::declval<const typename Trait::Handle&>(), std::declval<Arguments>()...));

 public:
  /// Throws c10::ValueError for devices that do not exist or do not go together, c10::Error for a module
  /// without a working clone(), naming the part.
  explicit DataParallel(typename Trait::Handle wrapped, DataParallelOptions options = {})
      : torch::nn::Module("DataParallel"),
        module(data_parallel::internal::not_empty<Trait>(std::move(wrapped))),
        plain_(register_module("module", Trait::as_module(module))),
        apply_(plain_,
               data_parallel::internal::ParallelPlan::of(options.device_ids, options.output_device,
                                                         options.dim, options.num_replicas),
               [this](int replica, at::Device device) { return clone_onto(replica, device); }) {}
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;
  template <ModuleHolderOf<T> Holder>
  explicit DataParallel(const Holder& holder, DataParallelOptions options = {})
      : DataParallel(holder.ptr(), std::move(options)) {}

  template <class... Arguments>
  requires(!Trait::kReturnTypeIsAsked && !kIsScript) auto forward(Arguments&&... arguments) {
    return compute<Output<Arguments...>>(
        [](const auto& handle, auto&&... own) {
          return Trait::forward(handle, std::forward<decltype(own)>(own)...);
        },
        std::forward<Arguments>(arguments)...);
  }
  /// For modules whose forward() returns what it is asked for, such as torch::nn::Sequential and AnyModule.
  template <class ReturnType = at::Tensor, class... Arguments>
  requires Trait::kReturnTypeIsAsked ReturnType forward(Arguments&&... arguments) {
    return compute<ReturnType>(
        [](const auto& handle, auto&&... own) {
          return Trait::template forward<ReturnType>(handle, std::forward<decltype(own)>(own)...);
        },
        std::forward<Arguments>(arguments)...);
  }
  /// For TorchScript modules: forward(x, y) or forward({x, y}).
  c10::IValue forward(std::vector<c10::IValue> arguments) requires kIsScript {
    const auto call = [](const auto& handle, auto& own) { return Trait::forward(handle, own); };
    if (arguments.empty())
      return compute<c10::IValue>([&](const auto& handle) { return call(handle, arguments); });
    return compute<c10::IValue>(call, arguments);
  }
  template <class... Arguments>
  requires(kIsScript && (std::constructible_from<c10::IValue, Arguments> && ...)) c10::IValue
      forward(Arguments&&... arguments) {
    return forward(std::vector<c10::IValue>{c10::IValue(std::forward<Arguments>(arguments))...});
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// Makes the replicas anew.
  void replicate() { apply_.replicate(); }
  /// How many replicas were made since the beginning.
  int64_t replicas_made() const { return apply_.replicas_made(); }
  /// The device of each replica; one device for a module without replicas.
  const std::vector<at::Device>& device_ids() const { return apply_.plan().devices; }
  at::Device output_device() const { return apply_.plan().output.device; }

  /// The module itself.
  const typename Trait::Handle module;

 private:
  std::shared_ptr<torch::nn::Module> clone_onto(int replica, at::Device device) {
    auto copy = Trait::clone(module, device);
    auto parts = Trait::as_module(copy);
    replicas_.resize(static_cast<size_t>(replica));
    replicas_.push_back(std::move(copy));
    return parts;
  }

  template <class Output, class Call, class... Arguments>
  Output compute(const Call& call, Arguments&&... arguments) {
    RECORD_USER_SCOPE("DataParallel.forward");
    std::vector<at::Tensor> tensors;
    [[maybe_unused]] const auto collect = [&tensors](const at::Tensor& tensor) { tensors.push_back(tensor); };
    (for_each_owned_tensor(std::as_const(arguments), collect), ...);
    auto batch = apply_.scatter(tensors, sizeof...(Arguments) > 0);
    // Calls the module, or a replica of it, with these tensors in the arguments.
    const auto call_with = [&](const typename Trait::Handle& handle, const std::vector<at::Tensor>& own) {
      [[maybe_unused]] auto next = own.begin();
      std::tuple<data_parallel::internal::ReplicaArgument<Arguments>...> copies{
          data_parallel::internal::argument_for_replica<Arguments>(arguments, next)...};
      return std::apply(
          [&](auto&... copy) { return call(handle, data_parallel::internal::pass_on<Arguments>(copy)...); },
          copies);
    };
    const auto handle_of = [&](int replica) -> const typename Trait::Handle& {
      return batch.replicas == 1 ? module : replicas_[static_cast<size_t>(replica)];
    };
    if constexpr (std::is_void_v<Output>) {
      apply_.run(batch, [&](int i, const std::vector<at::Tensor>& own) { call_with(handle_of(i), own); });
    } else {
      using Value = std::remove_cv_t<Output>;
      std::vector<std::optional<Value>> results(static_cast<size_t>(batch.replicas));
      apply_.run(batch, [&](int i, const std::vector<at::Tensor>& own) {
        results[static_cast<size_t>(i)].emplace(call_with(handle_of(i), own));
      });
      std::vector<Value> outputs;
      for (auto& result : results) outputs.push_back(*std::move(result));
      if (device_ids().size() == 1) return std::move(outputs[0]);

      std::vector<std::vector<at::Tensor>> found(outputs.size());
      for (size_t i = 0; i < outputs.size(); ++i) {
        for_each_owned_tensor(std::as_const(outputs[i]),
                              [&](const at::Tensor& tensor) { found[i].push_back(tensor); });
      }
      found = apply_.join(batch, std::move(found));
      for (size_t i = 0; i < outputs.size(); ++i) {
        auto next = found[i].begin();
        for_each_owned_tensor(outputs[i], [&](at::Tensor& tensor) { tensor = *next++; });
      }
      return data_parallel::internal::gather_all(outputs, apply_.plan().output);
    }
  }

  std::vector<typename Trait::Handle> replicas_;
  std::shared_ptr<torch::nn::Module> plain_;  // what `module` is as a torch::nn::Module
  data_parallel::internal::ParallelApply apply_;
};

template <class Given>
DataParallel(Given&&) -> DataParallel<ContainedModule<Given>>;
template <class Given>
DataParallel(Given&&, DataParallelOptions) -> DataParallel<ContainedModule<Given>>;

}  // namespace lockstep
