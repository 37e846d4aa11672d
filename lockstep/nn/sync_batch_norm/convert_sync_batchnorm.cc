// How torch::nn::BatchNorm modules are made to synchronise without being replaced.
//
// Their forward() ends in the operator aten::batch_norm, which torch composes of others, and which has no
// kernel of its own for any device. We register one, for the dispatch keys at which tensors of the CPU and of
// accelerators come by: with autograd, and below it (inference mode). It looks whether the call is that of a
// converted module, and computes sync_batch_norm() then; otherwise it calls torch's composition.
//
// A call shows no module, only tensors, so a module is known by one of them: running_mean, which no two
// modules share; without running statistics weight; with neither, a weight of ones that the conversion puts
// into the member (it is no parameter, and the kernel drops it again). A tensor is known by its TensorImpl,
// which stays the same through to(), load and optimizer steps. The registry holds it weakly, so its address
// can't come to belong to another.
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <lockstep/nn/module_inspection.h>
#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>

namespace lockstep {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

/// One converted module.
struct Conversion {
  std::weak_ptr<torch::nn::Module> module;
  ProcessGroup process_group;    // as given: empty for the default group of the time of the call
  bool weight_is_label = false;  // the weight says which module it is, and nothing else
};

/// The converted modules of this process. Thread-safe.
class Registry {
 public:
  /// Never destroyed: calls may come until the process ends.
  static Registry& instance() {
    static auto* registry = new Registry();
    return *registry;
  }

  void insert(const at::Tensor& label, Conversion conversion) {
    std::unique_lock lock(mutex_);
    std::erase_if(entries_, [](const auto& item) { return item.second.conversion.module.expired(); });
    entries_.insert_or_assign(label.unsafeGetTensorImpl(),
                              Entry{WeakTensor(label.getIntrusivePtr()), std::move(conversion)});
  }

  /// Of the module that calls with these tensors.
  std::optional<Conversion> find(const OptionalTensor& running_mean, const OptionalTensor& weight) const {
    const OptionalTensor& label = running_mean && running_mean->defined() ? running_mean : weight;
    if (!label || !label->defined()) return std::nullopt;
    std::shared_lock lock(mutex_);
    const auto found = entries_.find(label->unsafeGetTensorImpl());
    if (found == entries_.end()) return std::nullopt;
    return found->second.conversion;
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    WeakTensor label;  // keeps the address from being used again
    Conversion conversion;
  };

  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
};

at::Tensor intercepted(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
                       double momentum, double eps, bool cudnn_enabled) {
  const auto conversion = Registry::instance().find(running_mean, weight);
  if (!conversion) {
    return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps,
                                  cudnn_enabled);
  }
  const OptionalTensor real_weight = conversion->weight_is_label ? OptionalTensor() : weight;
  // In eval mode a module without running statistics says "training" too.
  const auto module = conversion->module.lock();
  if (training && module && module->is_training()) {
    if (const ProcessGroup group = sync_batch_norm_group(conversion->process_group)) {
      const at::Tensor none;
      return sync_batch_norm(input, real_weight.value_or(none), bias.value_or(none),
                             running_mean.value_or(none), running_var.value_or(none), eps, momentum, group);
    }
  }
  return at::native::batch_norm(input, real_weight, bias, running_mean, running_var, training, momentum, eps,
                                cudnn_enabled);
}

/// For calls below autograd, whose results have no history.
at::Tensor intercepted_below_autograd(const at::Tensor& input, const OptionalTensor& weight,
                                      const OptionalTensor& bias, const OptionalTensor& running_mean,
                                      const OptionalTensor& running_var, bool training, double momentum,
                                      double eps, bool cudnn_enabled) {
  at::NoGradGuard no_grad;
  return intercepted(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled);
}

/// At the first conversion, not when the library is loaded: programs that convert nothing keep torch as it
/// is. Like the registry it stays to the end.
void intercept_batch_norm() {
  static std::once_flag once;
  std::call_once(once, [] {
    const auto add = [](c10::DispatchKey key, auto kernel) {
      auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
      library->impl("batch_norm", kernel);
    };
    using Key = c10::DispatchKey;
    for (const Key key : {Key::AutogradCPU, Key::AutogradCUDA, Key::AutogradXPU, Key::AutogradPrivateUse1}) {
      add(key, TORCH_FN(intercepted));
    }
    for (const Key key : {Key::CPU, Key::CUDA, Key::XPU, Key::PrivateUse1}) {
      add(key, TORCH_FN(intercepted_below_autograd));
    }
  });
}

/// Converts `module` if it is an `Implementation`.
template <class Implementation>
bool convert_one(const std::shared_ptr<torch::nn::Module>& module, const ProcessGroup& process_group) {
  auto* norm = dynamic_cast<Implementation*>(module.get());
  if (!norm) return false;
  Conversion conversion{module, process_group};
  if (norm->running_mean.defined()) {
    Registry::instance().insert(norm->running_mean, std::move(conversion));
    return true;
  }
  if (!norm->options.affine()) {
    conversion.weight_is_label = true;
    if (!norm->weight.defined()) norm->weight = at::ones({norm->options.num_features()});
  }
  Registry::instance().insert(norm->weight, std::move(conversion));
  return true;
}

void convert(const std::shared_ptr<torch::nn::Module>& module, const ProcessGroup& process_group) {
  if (auto* norm = dynamic_cast<SyncBatchNormImpl*>(module.get())) {
    norm->process_group = process_group;
    return;
  }
  convert_one<torch::nn::BatchNorm1dImpl>(module, process_group) ||
      convert_one<torch::nn::BatchNorm2dImpl>(module, process_group) ||
      convert_one<torch::nn::BatchNorm3dImpl>(module, process_group);
}

/// How `module` was converted, if it is an `Implementation`.
template <class Implementation>
std::optional<Conversion> find_conversion(const torch::nn::Module& module) {
  const auto* norm = dynamic_cast<const Implementation*>(&module);
  if (norm == nullptr) return std::nullopt;
  return Registry::instance().find(norm->running_mean, norm->weight);
}

}  // namespace

void convert_sync_batchnorm_(torch::nn::Module& module, const ProcessGroup& process_group) {
  if (is_initialized()) sync_batch_norm_group(process_group);  // throws for ranks that are not in it
  intercept_batch_norm();
  if (is_batch_norm(module)) convert(module.shared_from_this(), process_group);
  for (const auto& child : module.modules(/*include_self=*/false)) convert(child, process_group);
}

std::vector<ProcessGroup> sync_batch_norm_groups(const torch::nn::Module& module) {
  std::vector<ProcessGroup> groups;
  for (const auto& one : module.modules()) {
    if (const auto* norm = dynamic_cast<const SyncBatchNormImpl*>(one.get())) {
      groups.push_back(norm->process_group);
    }
    for (const auto& conversion : {find_conversion<torch::nn::BatchNorm1dImpl>(*one),
                                   find_conversion<torch::nn::BatchNorm2dImpl>(*one),
                                   find_conversion<torch::nn::BatchNorm3dImpl>(*one)}) {
      if (conversion) groups.push_back(conversion->process_group);
    }
  }
  return groups;
}

}  // namespace lockstep
