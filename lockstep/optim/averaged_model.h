#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <lockstep/nn/wrapped_module.h>

/// torch/optim/swa_utils.py: averages of weights. Include <lockstep/optim/swa_utils.h> for all of it.
namespace lockstep::swa_utils {

/// The new average of a tensor from the old one, the model's of now, and the number of models averaged.
using AvgFn =
    std::function<at::Tensor(const at::Tensor& averaged, const at::Tensor& current, int64_t num_averaged)>;
/// The same for many tensors of one device and dtype at once, in place.
using MultiAvgFn = std::function<void(const std::vector<at::Tensor>& averaged,
                                      const std::vector<at::Tensor>& current, int64_t num_averaged)>;

/// Exponential moving average: decay · averaged + (1 - decay) · current. Throws c10::ValueError for a decay
/// outside [0, 1].
AvgFn get_ema_avg_fn(double decay = 0.999);
MultiAvgFn get_ema_multi_avg_fn(double decay = 0.999);
/// Stochastic weight averaging: all models with the same weight.
AvgFn get_swa_avg_fn();
MultiAvgFn get_swa_multi_avg_fn();

struct AveragedModelOptions {
  std::optional<at::Device> device =
      {};             ///< where the average lies; where the model's tensors lie unless told
  AvgFn avg_fn = {};  ///< at most one of the two; none: stochastic weight averaging
  MultiAvgFn multi_avg_fn = {};
  bool use_buffers = false;  ///< average the buffers, too, rather than copy them
};

namespace internal {

/// What AveragedModel does with tensors.
class WeightAverage {
 public:
  WeightAverage(AveragedModelOptions options, at::Tensor n_averaged);
  void update(const std::vector<at::Tensor>& averaged_parameters,
              const std::vector<at::Tensor>& averaged_buffers, const torch::nn::Module& model);

 private:
  void average(const std::vector<at::Tensor>& averaged, const std::vector<at::Tensor>& current,
               int64_t num_averaged) const;

  AveragedModelOptions options_;
  at::Tensor n_averaged_;
};

/// Copies parameters and buffers by name. Throws c10::ValueError that names what only one of them has.
void copy_state(const std::vector<NamedTensor>& from, const std::vector<NamedTensor>& to);

}  // namespace internal

/// A model whose weights are averages of another's, as that is trained: exponential moving averages (EMA), or
/// stochastic weight averaging (SWA; Izmailov and others, arXiv:1803.05407). Evaluate with it, and keep it.
///
///     lockstep::swa_utils::AveragedModel ema(net, {.multi_avg_fn =
///     lockstep::swa_utils::get_ema_multi_avg_fn(0.999)},
///                                            [] { return std::make_shared<Net>(); });
///     for (…) { …; optimizer.step(); ema.update_parameters(*net); }
///     ema(images);
///
/// The model is what DistributedDataParallel takes: a std::shared_ptr or a holder (torch::nn::Sequential, any
/// TORCH_MODULE), a torch::nn::AnyModule, a torch::jit::Module. It is copied by its clone(); one that derives
/// from plain torch::nn::Module has none, so pass a function that makes another of the same structure: its
/// parameters and buffers then get the model's values. Under DistributedDataParallel give the wrapped module
/// (`ddp.module`), and to update_parameters() either: all ranks hold the same weights after a step, so they
/// compute the same average, without communication.
///
/// A torch::nn::Module: parameters(), to(), train(), torch::save(). As in Python its state is `module.` and
/// `n_averaged`, without the averaging function. A tensor that the copy has under two names is averaged once.
/// Used by one thread at a time. torch/optim/swa_utils.py.
template <class Wrapped>
class AveragedModel : public torch::nn::Module, public ForwardOfWrapper<AveragedModel<Wrapped>, Wrapped> {
  using Traits = WrappedModule<Wrapped>;
  friend ForwardOfWrapper<AveragedModel, Wrapped>;

 public:
  using Handle = typename Traits::Handle;
  using Factory = std::function<Handle()>;

  /// Throws c10::ValueError when both averaging functions are given, and when `factory` made a module with
  /// other parameters or buffers; c10::Error when the module has no clone() and no factory was given.
  explicit AveragedModel(const Handle& model, AveragedModelOptions options = {}, const Factory& factory = {})
      : torch::nn::Module("AveragedModel"),
        module(copy_of(model, factory, options.device)),
        n_averaged(register_buffer("n_averaged", at::zeros({}, at::TensorOptions(at::kLong).device(
                                                                   options.device.value_or(at::kCPU))))),
        average_(std::move(options), n_averaged) {
    inner_ = register_module("module", Traits::as_module(module));
  }
  /// A module holder, such as torch::nn::Linear.
  template <class Holder>
  requires ModuleHolderOf<Holder, Wrapped>
  explicit AveragedModel(const Holder& holder, AveragedModelOptions options = {}, const Factory& factory = {})
      : AveragedModel(holder.ptr(), std::move(options), factory) {}

  /// Takes the weights of `model` into the average; the first time it copies them. Parameters and buffers are
  /// matched by their order, so `model` may be a wrapper. Throws c10::ValueError for a model with others.
  void update_parameters(const torch::nn::Module& model) {
    average_.update(inner_->parameters(), inner_->buffers(), model);
  }
  template <class Holder>
  requires requires(const Holder& holder) { holder.ptr(); }
  void update_parameters(const Holder& holder) { update_parameters(*holder.ptr()); }
  void update_parameters(const torch::jit::Module& model) {
    update_parameters(*WrappedModule<torch::jit::Module>::as_module(model));
  }

  /// The averaged module.
  const Handle module;
  /// How many models are in the average, a scalar int64.
  at::Tensor n_averaged;

 private:
  template <class Call, class... Arguments>
  static auto run(Call&& call, Arguments&&... arguments) {
    return call(std::forward<Arguments>(arguments)...);
  }

  static Handle copy_of(const Handle& model, const Factory& factory,
                        const std::optional<at::Device>& device) {
    TORCH_CHECK_VALUE(!Traits::is_empty(model), "AveragedModel: the module is empty");
    Handle copy = factory ? factory() : Traits::clone(model);
    TORCH_CHECK_VALUE(!Traits::is_empty(copy), "AveragedModel: the factory made no module");
    // clone() leaves out members that have none.
    internal::copy_state(Traits::named_parameters(model), Traits::named_parameters(copy));
    internal::copy_state(Traits::named_buffers(model), Traits::named_buffers(copy));
    Traits::train(copy, Traits::is_training(model));
    if (device) Traits::as_module(copy)->to(*device);
    return copy;
  }

  std::shared_ptr<torch::nn::Module> inner_;
  internal::WeightAverage average_;
};

template <class Given>
AveragedModel(const Given&, AveragedModelOptions = {},
              const std::function<typename WrappedModule<ContainedModule<Given>>::Handle()>& = {})
    -> AveragedModel<ContainedModule<Given>>;

}  // namespace lockstep::swa_utils
