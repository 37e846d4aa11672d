// Averages the models that averaged_model_test.py gives, to be compared with Python's averages.
//
//     averaged_model_driver JOBS OUTPUT
//
// JOBS: a pickled {job name: {"average": swa|swa multi|ema|ema multi|none, "decay": …, "use_buffers": …,
// "states": [the model's {name: tensor} at each update], "batches": [inputs for update_bn]}}. OUTPUT: {job
// name: {"averages": [the average's {name: tensor} after each update], "after update_bn": {…}}}.

#include <torch/torch.h>

#include <lockstep/collectives/testing/pickle_file.h>
#include <lockstep/optim/swa_utils.h>
#include <lockstep/serialization/state_dict.h>
#include <lockstep/testing/driver.h>

namespace averaged_model_driver {
namespace {

namespace nn = torch::nn;
namespace swa = lockstep::swa_utils;
using lockstep::from_object;
using lockstep::state_value;
using lockstep::StateDict;
using lockstep::to_object;
using Tensors = std::map<std::string, torch::Tensor>;

nn::Sequential make_net() {
  nn::Sequential net(nn::Linear(5, 7), nn::BatchNorm1d(7), nn::Tanh(),
                     nn::BatchNorm1d(nn::BatchNorm1dOptions(7).momentum(0.3).affine(false)),
                     nn::Linear(7, 3));
  return net;
}

void load(nn::Module& net, const Tensors& values) {
  torch::NoGradGuard no_grad;
  for (const auto& item : net.named_parameters()) item.value().detach().copy_(values.at(item.key()));
  for (const auto& item : net.named_buffers()) item.value().copy_(values.at(item.key()));
}

Tensors tensors_of(const nn::Module& net) {
  Tensors tensors;
  for (const auto& item : net.named_parameters()) tensors[item.key()] = item.value().detach().clone();
  for (const auto& item : net.named_buffers()) tensors[item.key()] = item.value().clone();
  return tensors;
}

swa::AveragedModelOptions options_of(const StateDict& job) {
  swa::AveragedModelOptions options{.use_buffers = state_value<bool>(job, "use_buffers", "driver")};
  const auto average = state_value<std::string>(job, "average", "driver");
  const auto decay = state_value<double>(job, "decay", "driver");
  if (average == "swa") options.avg_fn = swa::get_swa_avg_fn();
  if (average == "swa multi") options.multi_avg_fn = swa::get_swa_multi_avg_fn();
  if (average == "ema") options.avg_fn = swa::get_ema_avg_fn(decay);
  if (average == "ema multi") options.multi_avg_fn = swa::get_ema_multi_avg_fn(decay);
  return options;
}

StateDict answer(const StateDict& job) {
  auto net = make_net();
  swa::AveragedModel average(net, options_of(job));
  std::vector<Tensors> averages;
  for (const auto& state : state_value<std::vector<Tensors>>(job, "states", "driver")) {
    load(*net, state);
    average.update_parameters(net);
    averages.push_back(tensors_of(average));
  }
  const auto batches = state_value<std::vector<torch::Tensor>>(job, "batches", "driver");
  average.eval();
  swa::update_bn(batches, average);
  TORCH_CHECK(!average.is_training() && !average.module->is_training(), "update_bn() changed the mode");
  return {{"averages", to_object(averages)}, {"after update_bn", to_object(tensors_of(average))}};
}

}  // namespace

LOCKSTEP_DRIVER(averaged_model_driver) {
  TORCH_CHECK(argc == 3, "usage: averaged_model_driver JOBS OUTPUT");
  // Not by to(), which in LibTorch takes integer buffers along.
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  StateDict results;
  for (const auto& [name, job] : from_object<StateDict>(lockstep::testing::read_pickle(argv[1]))) {
    results[name] = to_object(answer(from_object<StateDict>(job)));
  }
  lockstep::testing::write_pickle(argv[2], to_object(results));
  return 0;
}

}  // namespace averaged_model_driver
