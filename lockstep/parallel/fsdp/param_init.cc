#include <typeinfo>
#include <unordered_set>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>
#include <lockstep/parallel/fsdp/param_init.h>

namespace lockstep::fsdp {
namespace {

void reset(torch::nn::PReLUImpl& module) {
  const at::NoGradGuard no_grad;
  module.weight.fill_(module.options.init());
}

/// As its constructor: first out_proj's.
void reset(torch::nn::MultiheadAttentionImpl& module) {
  module.out_proj->reset_parameters();
  module._reset_parameters();
}

template <class Module>
void reset(Module& module) {
  module.reset_parameters();
}

/// Calls `action` with the module as what it is, if that is one of these; a class derived from one has more to set.
template <class... Modules, class Action>
bool with_one_of(torch::nn::Module& module, const Action& action) {
  const auto is = [&]<class Module>(Module* /*type*/) {
    if (typeid(module) != typeid(Module)) return false;
    action(dynamic_cast<Module&>(module));
    return true;
  };
  return (is(static_cast<Modules*>(nullptr)) || ...);
}

template <class Action>
bool with_known(torch::nn::Module& module, const Action& action) {
  namespace nn = torch::nn;
  return with_one_of<nn::LinearImpl, nn::BilinearImpl, nn::EmbeddingImpl, nn::EmbeddingBagImpl,
                     nn::Conv1dImpl, nn::Conv2dImpl, nn::Conv3dImpl, nn::ConvTranspose1dImpl,
                     nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl, nn::LayerNormImpl, nn::GroupNormImpl,
                     nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl, nn::InstanceNorm1dImpl,
                     nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl, SyncBatchNormImpl, nn::RNNImpl,
                     nn::LSTMImpl, nn::GRUImpl, nn::RNNCellImpl, nn::LSTMCellImpl, nn::GRUCellImpl,
                     nn::PReLUImpl, nn::MultiheadAttentionImpl>(module, action);
}

void add_units(const std::shared_ptr<torch::nn::Module>& module, const std::string& name,
               std::unordered_set<const torch::nn::Module*>& done, std::vector<InitUnit>& units) {
  if (!done.insert(module.get()).second) return;
  const bool whole = dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(module.get()) != nullptr;
  if (!whole) {
    for (const auto& child : module->named_children()) {
      add_units(child.value(), name.empty() ? child.key() : name + "." + child.key(), done, units);
    }
  }
  InitUnit unit{.name = name,
                .module = module,
                .parameters = module->parameters(/*recurse=*/whole),
                .buffers = module->buffers(/*recurse=*/whole)};
  if (!unit.parameters.empty() || !unit.buffers.empty()) units.push_back(std::move(unit));
}

}  // namespace

void reset_parameters(torch::nn::Module& module) {
  const bool known = with_known(module, [](auto& as_itself) { reset(as_itself); });
  TORCH_CHECK_VALUE(known, "fsdp::reset_parameters: ", module.name(),
                    " is no class of LibTorch's with parameters of its own; set those of your classes in a "
                    "param_init_fn of your own, which calls this function for the others");
}

bool can_reset_parameters(const torch::nn::Module& module) {
  return with_known(const_cast<torch::nn::Module&>(module), [](auto&) {});
}

std::vector<InitUnit> init_units(const std::shared_ptr<torch::nn::Module>& model,
                                 const std::vector<std::shared_ptr<torch::nn::Module>>& ignored_modules) {
  std::unordered_set<const torch::nn::Module*> done;
  for (const auto& root : ignored_modules) {
    for (const auto& module : root->modules()) done.insert(module.get());
  }
  std::vector<InitUnit> units;
  add_units(model, "", done, units);
  return units;
}

}  // namespace lockstep::fsdp
