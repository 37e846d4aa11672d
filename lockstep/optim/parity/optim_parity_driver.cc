// Runs the optimizers that optim_parity_test.py asks for and writes the parameters, so that they can be
// compared with PyTorch's.
//
//     lockstep run --nproc-per-node N optim_parity_driver JOBS OUTPUT
//
// JOBS: a pickled {job name: {"kind": …, "optimizer": sgd|adam, "initial": [N×…], "gradients": [steps×N×…]}},
// a tensor for each parameter, with every rank's values. OUTPUT: rank r writes {job name: {index: parameter,
// "owners": by parameter}} to OUTPUT.r.

#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/collectives/testing/pickle_file.h>
#include <lockstep/optim/model_averaging.h>
#include <lockstep/optim/post_local_sgd_optimizer.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/testing/driver.h>

namespace optim_parity_driver {
namespace {

using lockstep::testing::at_key;

namespace optim = torch::optim;
using Tensors = c10::Dict<std::string, at::Tensor>;

std::vector<at::Tensor> tensors_at(const c10::IValue& job, const std::string& key) {
  std::vector<at::Tensor> answer;
  for (const c10::IValue& value : at_key(job, key).toListRef()) answer.push_back(value.toTensor());
  return answer;
}

/// The first two parameters make one group, the others another.
std::vector<optim::OptimizerParamGroup> groups_of(const std::vector<at::Tensor>& parameters) {
  return {{{parameters.begin(), parameters.begin() + 2}}, {{parameters.begin() + 2, parameters.end()}}};
}

Tensors train(const c10::IValue& job, int rank) {
  const std::string kind = at_key(job, "kind").toStringRef();
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& initial : tensors_at(job, "initial")) {
    parameters.push_back(initial[rank].clone().requires_grad_());
  }
  const auto local_optimizer =
      at_key(job, "optimizer").toStringRef() == "adam"
          ? lockstep::optimizer_class<optim::Adam>(optim::AdamOptions(0.01))
          : lockstep::optimizer_class<optim::SGD>(optim::SGDOptions(0.05).momentum(0.9));
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<lockstep::ModelAverager> averager;
  Tensors result;
  if (kind.starts_with("zero")) {
    auto zero = std::make_unique<lockstep::ZeroRedundancyOptimizer>(
        groups_of(parameters), local_optimizer,
        lockstep::ZeroRedundancyOptions{.parameters_as_bucket_view = kind == "zero with buckets"});
    const at::Tensor owners = at::empty({static_cast<int64_t>(parameters.size())}, at::kLong);
    for (size_t owner = 0; owner < zero->partition().size(); ++owner) {
      for (size_t group = 0; group < 2; ++group) {
        for (const size_t index : zero->partition()[owner][group])
          owners[static_cast<int64_t>(2 * group + index)] = static_cast<int64_t>(owner);
      }
    }
    result.insert("owners", owners);
    optimizer = std::move(zero);
  } else if (kind == "post-local SGD") {
    optimizer = std::make_unique<lockstep::PostLocalSGDOptimizer>(
        local_optimizer(groups_of(parameters)),
        std::make_shared<lockstep::PeriodicModelAverager>(/*period=*/3, /*warmup_steps=*/2));
  } else {
    optimizer = local_optimizer(groups_of(parameters));
    const int size = lockstep::get_world_size();
    averager = std::make_unique<lockstep::HierarchicalModelAverager>(
        std::vector<std::pair<int64_t, int>>{{2, size % 2 == 0 ? 2 : 1}, {4, size}}, /*warmup_steps=*/1);
  }
  const auto gradients = tensors_at(job, "gradients");
  for (int64_t step = 0; step < gradients[0].size(0); ++step) {
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i].mutable_grad() = gradients[i][step][rank].clone();
    optimizer->step();
    if (averager) averager->average_parameters(optimizer->param_groups());
  }
  for (size_t i = 0; i < parameters.size(); ++i)
    result.insert(std::to_string(i), parameters[i].detach().clone());
  return result;
}

}  // namespace

LOCKSTEP_DRIVER(optim_parity_driver) {
  return lockstep::testing::run_jobs(argc, argv, train);
}

}  // namespace optim_parity_driver
