// Goes on, in shards, with trainings that fsdp_state_test.py has begun, and hands them back.
//
//     lockstep run --nproc-per-node N fsdp_state_driver INPUT OUTPUT
//
// INPUT, of torch.save: {case: {"model": state_dict(), "optimizer": get_optimizer_state_dict(), "x": batches of all ranks}}.
// OUTPUT.r: {case: {"model", "optimizer"}}, whole on rank 0, whose weights are in OUTPUT.CASE.safetensors, too.
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <torch/torch.h>

#include <lockstep/checkpoint/python_checkpoint.h>
#include <lockstep/checkpoint/safetensors.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/testing/driver.h>

namespace fsdp_state_driver {
namespace {

namespace optim = torch::optim;
using lockstep::from_object;
using lockstep::StateDict;
using lockstep::to_object;

struct Net : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(5, 7));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(7, 2));
  torch::Tensor scale = register_parameter("scale", torch::ones({}));
  torch::Tensor forward(const torch::Tensor& x) { return scale * last(torch::tanh(first(x))); }
};
using Model = lockstep::FullyShardedDataParallel<Net>;

/// Whose options the state has.
std::unique_ptr<optim::Optimizer> make_optimizer(const std::string& name, Model& model) {
  if (name == "sgd") return model.make_optimizer<optim::SGD>(optim::SGDOptions(1).momentum(0.5));
  if (name == "adam") return model.make_optimizer<optim::Adam>(optim::AdamOptions(1).amsgrad(true));
  if (name == "adamw") return model.make_optimizer<optim::AdamW>(optim::AdamWOptions(1));
  if (name == "rmsprop") {
    return model.make_optimizer<optim::RMSprop>(optim::RMSpropOptions(1).momentum(0.1).centered(true));
  }
  return model.make_optimizer<optim::Adagrad>(optim::AdagradOptions(1));
}

StateDict go_on(const std::string& name, const StateDict& begun, const lockstep::DefaultGroup& world) {
  const auto net = std::make_shared<Net>();
  net->to(at::kDouble);
  Model model(net, {.auto_wrap_policy = lockstep::fsdp::size_based_auto_wrap_policy(10)});
  const auto optimizer = make_optimizer(name, model);
  model.load_full_state_dict(from_object<StateDict>(begun.at("model")));
  model.load_full_optim_state_dict(*optimizer, from_object<StateDict>(begun.at("optimizer")));
  const auto x = begun.at("x").toTensor();
  const int64_t share = x.size(1) / world.size();
  for (int64_t step = 0; step < x.size(0); ++step) {
    optimizer->zero_grad();
    model(x[step].narrow(0, world.rank() * share, share)).square().mean().backward();
    optimizer->step();
  }
  return {{"model", to_object(model.full_state_dict(/*rank0_only=*/true))},
          {"optimizer", to_object(model.full_optim_state_dict(*optimizer, /*rank0_only=*/true))}};
}

}  // namespace

LOCKSTEP_DRIVER(fsdp_state_driver) {
  TORCH_CHECK(argc == 3, "usage: fsdp_state_driver INPUT OUTPUT");
  auto world = lockstep::init_process_group();
  const std::string output = argv[2];
  StateDict done;
  for (const auto& [name, begun] : lockstep::load_python_checkpoint(argv[1])) {
    done.emplace(name, to_object(go_on(name, from_object<StateDict>(begun), world)));
    if (world.rank() != 0) continue;
    std::map<std::string, at::Tensor> weights;
    for (const auto& [parameter, value] :
         from_object<StateDict>(from_object<StateDict>(done.at(name)).at("model"))) {
      weights.emplace(parameter, value.toTensor());
    }
    lockstep::safetensors::save_file(weights, output + "." + name + ".safetensors");
  }
  lockstep::save_python_checkpoint(done, output + "." + std::to_string(world.rank()));
  return 0;
}

}  // namespace fsdp_state_driver
