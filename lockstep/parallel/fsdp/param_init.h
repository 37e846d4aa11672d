#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

/// Values for modules that were built on the meta device. torch/distributed/fsdp/_init_utils.py.
namespace lockstep::fsdp {

/// Sets a module's own parameters and buffers, not its children's. Of a MultiheadAttention those of its out_proj, too.
using ParamInitFn = std::function<void(torch::nn::Module& module)>;

/// Gives them the values that the class's constructor gives, from torch's random numbers: those of LibTorch's classes with
/// parameters of their own, and SyncBatchNorm. Throws c10::ValueError for others, also for what is derived from these.
void reset_parameters(torch::nn::Module& module);
/// Whether it knows the module's class.
bool can_reset_parameters(const torch::nn::Module& module);

/// A module with tensors of its own, which get their values together.
struct InitUnit {
  std::string name;  ///< dotted; "" of the whole model
  std::shared_ptr<torch::nn::Module> module;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;
};

/// The units of a model in the order in which constructors set values: children before what contains them. `ignored_modules`
/// with all within them are in none.
std::vector<InitUnit> init_units(const std::shared_ptr<torch::nn::Module>& model,
                                 const std::vector<std::shared_ptr<torch::nn::Module>>& ignored_modules = {});

}  // namespace lockstep::fsdp
