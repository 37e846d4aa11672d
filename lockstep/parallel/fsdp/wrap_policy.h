#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

/// Which modules of a model make groups of their own. torch/distributed/fsdp/wrap.py.
namespace lockstep::fsdp {

/// Asked about each module: with `recurse` whether its children are looked at, without whether it shall be a group;
/// `nonwrapped_numel` is the number of its elements that are in no group yet.
using AutoWrapPolicy =
    std::function<bool(const torch::nn::Module& module, bool recurse, int64_t nonwrapped_numel)>;

/// Modules with at least `min_num_params` elements that are in no group yet, the smallest such ones; no
/// MultiheadAttention is taken apart, and no ModuleList or ModuleDict is a group itself.
AutoWrapPolicy size_based_auto_wrap_policy(int64_t min_num_params = 100'000'000);

/// Modules for which the function is true.
AutoWrapPolicy lambda_auto_wrap_policy(std::function<bool(const torch::nn::Module&)> lambda_fn);

/// Modules of these classes: module_wrap_policy<BlockImpl>().
template <class... ModuleClasses>
AutoWrapPolicy module_wrap_policy() {
  return lambda_auto_wrap_policy([](const torch::nn::Module& module) {
    return ((dynamic_cast<const ModuleClasses*>(&module) != nullptr) || ...);
  });
}

/// The policy, and each BatchNorm is a group: what torch makes of a policy under mixed precision.
AutoWrapPolicy batch_norms_apart(AutoWrapPolicy policy);
/// The parameters and buffers of all BatchNorms in the model, SyncBatchNorm among them.
std::vector<at::Tensor> batch_norm_tensors(const torch::nn::Module& model);

/// The parameters that are reduced together.
struct ParameterGroup {
  std::string module;                   ///< its dotted name; "" of the whole model
  std::vector<std::string> parameters;  ///< dotted names in definition order, of a tied one the first
  bool operator==(const ParameterGroup&) const = default;
};

/// The groups that a policy makes of a model, children before what contains them, the model itself with what is left
/// last. A parameter that several modules have is in the first one's group. `ignored_modules` with all within them, and
/// `ignored_parameters`, are in none. Without a policy the whole model is one.
std::vector<ParameterGroup> parameter_groups(
    const torch::nn::Module& model, const AutoWrapPolicy& auto_wrap_policy = {},
    const std::vector<std::shared_ptr<torch::nn::Module>>& ignored_modules = {},
    const std::vector<at::Tensor>& ignored_parameters = {});

}  // namespace lockstep::fsdp
