#include <unordered_set>
#include <utility>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <lockstep/nn/module_inspection.h>
#include <lockstep/parallel/fsdp/wrap_policy.h>

namespace lockstep::fsdp {
namespace {

using torch::nn::Module;

template <class... ModuleClasses>
bool is_one_of(const Module& module) {
  return ((dynamic_cast<const ModuleClasses*>(&module) != nullptr) || ...);
}

/// Goes through a model as torch's _recursive_wrap() does.
class Grouping {
 public:
  Grouping(const AutoWrapPolicy& policy, const std::vector<std::shared_ptr<Module>>& ignored_modules,
           const std::vector<at::Tensor>& ignored_parameters)
      : policy_(policy) {
    for (const auto& root : ignored_modules) {
      for (const auto& module : root->modules()) ignored_modules_.insert(module.get());
      for (const auto& parameter : root->parameters()) taken_.insert(parameter.unsafeGetTensorImpl());
    }
    for (const auto& parameter : ignored_parameters) taken_.insert(parameter.unsafeGetTensorImpl());
    ignored_parameters_ = taken_;
  }

  /// How many of the module's elements are in groups when this returns.
  int64_t visit(const Module& module, const std::string& name, bool is_root) {
    const int64_t numel = numel_of(module);
    if (!policy_ || !policy_(module, /*recurse=*/true, numel)) return 0;
    int64_t wrapped = 0;
    std::unordered_set<const Module*> seen;  // one with two names counts once
    for (const auto& child : module.named_children()) {
      if (!seen.insert(child.value().get()).second) continue;
      if (ignored_modules_.count(child.value().get()) > 0) continue;
      wrapped +=
          visit(*child.value(), name.empty() ? child.key() : name + "." + child.key(), /*is_root=*/false);
    }
    if (is_root || !policy_(module, /*recurse=*/false, numel - wrapped)) return wrapped;
    add(module, name);
    return numel;
  }

  void add(const Module& module, const std::string& name) {
    ParameterGroup group{.module = name, .parameters = {}};
    for (const auto& parameter : module.named_parameters()) {
      if (!taken_.insert(parameter.value().unsafeGetTensorImpl()).second) continue;
      group.parameters.push_back(name.empty() ? parameter.key() : name + "." + parameter.key());
    }
    if (!group.parameters.empty()) groups_.push_back(std::move(group));
  }

  std::vector<ParameterGroup> take() { return std::move(groups_); }

 private:
  int64_t numel_of(const Module& module) const {
    std::unordered_set<const c10::TensorImpl*> counted = ignored_parameters_;
    int64_t numel = 0;
    for (const auto& parameter : module.parameters()) {
      if (counted.insert(parameter.unsafeGetTensorImpl()).second) numel += parameter.numel();
    }
    return numel;
  }

  const AutoWrapPolicy& policy_;
  std::unordered_set<const Module*> ignored_modules_;
  std::unordered_set<const c10::TensorImpl*> ignored_parameters_;
  std::unordered_set<const c10::TensorImpl*> taken_;  // ignored, or in a group
  std::vector<ParameterGroup> groups_;
};

}  // namespace

AutoWrapPolicy size_based_auto_wrap_policy(int64_t min_num_params) {
  return [min_num_params](const Module& module, bool recurse, int64_t nonwrapped_numel) {
    if (nonwrapped_numel < min_num_params) return false;
    return recurse ? !is_one_of<torch::nn::MultiheadAttentionImpl>(module)
                   : !is_one_of<torch::nn::ModuleListImpl, torch::nn::ModuleDictImpl>(module);
  };
}

AutoWrapPolicy lambda_auto_wrap_policy(std::function<bool(const Module&)> lambda_fn) {
  return
      [lambda_fn = std::move(lambda_fn)](const Module& module, bool recurse, int64_t /*nonwrapped_numel*/) {
        return recurse || lambda_fn(module);
      };
}

AutoWrapPolicy batch_norms_apart(AutoWrapPolicy policy) {
  return [policy = std::move(policy)](const Module& module, bool recurse, int64_t nonwrapped_numel) {
    return recurse || is_batch_norm(module) || policy(module, /*recurse=*/false, nonwrapped_numel);
  };
}

std::vector<at::Tensor> batch_norm_tensors(const Module& model) {
  std::vector<at::Tensor> tensors;
  for (const auto& module : model.modules()) {
    if (!is_batch_norm(*module)) continue;
    for (const auto& own : {module->parameters(), module->buffers()}) {
      tensors.insert(tensors.end(), own.begin(), own.end());
    }
  }
  return tensors;
}

std::vector<ParameterGroup> parameter_groups(const Module& model, const AutoWrapPolicy& auto_wrap_policy,
                                             const std::vector<std::shared_ptr<Module>>& ignored_modules,
                                             const std::vector<at::Tensor>& ignored_parameters) {
  Grouping grouping(auto_wrap_policy, ignored_modules, ignored_parameters);
  grouping.visit(model, "", /*is_root=*/true);
  grouping.add(model, "");
  return grouping.take();
}

}  // namespace lockstep::fsdp
