#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <lockstep/ddp/module_inspection.h>

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

}  // namespace lockstep
