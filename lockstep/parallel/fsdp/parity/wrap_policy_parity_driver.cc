// Writes the groups that policies make of the models of wrap_policy_parity_test.py.
//
//     wrap_policy_parity_driver OUTPUT
//
// OUTPUT: a pickled {"MODEL, POLICY": {module: [parameters]}}.
#include <algorithm>
#include <iostream>

#include <torch/torch.h>

#include <lockstep/collectives/testing/pickle_file.h>
#include <lockstep/parallel/fsdp/wrap_policy.h>
#include <lockstep/testing/driver.h>

namespace wrap_policy_parity_driver {
namespace {

namespace fsdp = lockstep::fsdp;
namespace nn = torch::nn;

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width) {
    register_module("attention", nn::MultiheadAttention(width, 2));
    register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    register_module("up", nn::Linear(width, 4 * width));
    register_module("down", nn::Linear(4 * width, width));
  }
};
TORCH_MODULE(Block);

struct Head : nn::Module {
  explicit Head(torch::Tensor weight) { register_parameter("weight", std::move(weight)); }
};

struct TransformerImpl : nn::Module {
  explicit TransformerImpl(bool tied) {
    const int64_t width = 8;
    auto embedding = register_module("embedding", nn::Embedding(50, width));
    auto blocks = register_module("blocks", nn::ModuleList());
    for (int i = 0; i < 3; ++i) blocks->push_back(Block(width));
    register_module("head", std::make_shared<Head>(tied ? embedding->weight : torch::rand({50, width})));
  }
};

struct DigitsImpl : nn::Module {
  DigitsImpl() {
    register_module("fc1", nn::Linear(784, 256));
    register_module("fc2", nn::Linear(256, 10));
  }
};

}  // namespace

LOCKSTEP_DRIVER(wrap_policy_parity_driver) {
  if (argc != 2) {
    std::cerr << "usage: wrap_policy_parity_driver OUTPUT\n";
    return 2;
  }
  const std::pair<const char*, std::shared_ptr<nn::Module>> models[] = {
      {"digits", std::make_shared<DigitsImpl>()},
      {"transformer", std::make_shared<TransformerImpl>(false)},
      {"tied", std::make_shared<TransformerImpl>(true)}};
  const std::pair<const char*, fsdp::AutoWrapPolicy> policies[] = {
      {"none", {}},
      {"size 100000", fsdp::size_based_auto_wrap_policy(100'000)},
      {"size 1000", fsdp::size_based_auto_wrap_policy(1000)},
      {"size 300", fsdp::size_based_auto_wrap_policy(300)},
      {"size 1", fsdp::size_based_auto_wrap_policy(1)},
      {"blocks", fsdp::module_wrap_policy<BlockImpl>()},
      {"linear and embedding", fsdp::module_wrap_policy<nn::LinearImpl, nn::EmbeddingImpl, Head>()},
      {"norms by lambda", fsdp::lambda_auto_wrap_policy([](const nn::Module& module) {
         return dynamic_cast<const nn::LayerNormImpl*>(&module) != nullptr;
       })}};
  using Groups = c10::Dict<std::string, c10::List<std::string>>;
  c10::Dict<std::string, Groups> result;
  for (const auto& [model_name, model] : models) {
    for (const auto& [policy_name, policy] : policies) {
      Groups groups;
      for (auto& group : fsdp::parameter_groups(*model, policy)) {
        std::sort(group.parameters.begin(), group.parameters.end());
        groups.insert(group.module, c10::List<std::string>(c10::ArrayRef<std::string>(group.parameters)));
      }
      result.insert(std::string(model_name) + ", " + policy_name, groups);
    }
  }
  lockstep::testing::write_pickle(argv[1], result);
  return 0;
}

}  // namespace wrap_policy_parity_driver
