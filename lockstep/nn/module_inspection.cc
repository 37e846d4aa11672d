#include <algorithm>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>

#include <lockstep/nn/module_inspection.h>
#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>

namespace lockstep {

std::vector<std::string> sparse_parameters(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_modules(/*name_prefix=*/"", /*include_self=*/true)) {
    const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(item.value().get());
    const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(item.value().get());
    if ((embedding != nullptr && embedding->options.sparse()) || (bag != nullptr && bag->options.sparse())) {
      names.push_back(item.key().empty() ? "weight" : item.key() + ".weight");
    }
  }
  return names;
}

bool is_batch_norm(const torch::nn::Module& module) {
  return dynamic_cast<const SyncBatchNormImpl*>(&module) ||
         dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) ||
         dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) ||
         dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module);
}

bool has_sync_batch_norm(const torch::nn::Module& module) {
  const auto modules = module.modules();
  return std::any_of(modules.begin(), modules.end(), [](const auto& child) {
    return dynamic_cast<const SyncBatchNormImpl*>(child.get()) != nullptr;
  });
}

}  // namespace lockstep
