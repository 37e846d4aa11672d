// Trains a small network with DistributedDataParallel on a device, for device_parity_test.py:
//
//     lockstep run --nproc-per-node N device_parity_driver JOB OUTPUT DEVICE BACKEND
//
// JOB: {"weights": [tensors in parameters()' order], "inputs": steps × samples × 6, "targets": the same × 3,
// "half": train with autocast to float16 and a GradScaler}. Each rank takes its share of the samples and
// writes its weights, in the same order, and losses into OUTPUT.rank.
#include <string>

#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/collectives/testing/pickle_file.h>
#include <lockstep/device/device.h>
#include <lockstep/optim/autocast.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/serialization/object_conversion.h>
#include <lockstep/serialization/state_dict.h>
#include <lockstep/testing/driver.h>

namespace device_parity_driver {
namespace {

using lockstep::testing::at_key;
using Tensors = std::vector<at::Tensor>;

struct Net : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::relu(first(x))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 64));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(64, 3));
};

/// "cuda": of each rank's own.
void run(const std::string& job_path, const std::string& output, c10::Device device,
         const std::string& backend) {
  if (device.is_cuda() && !device.has_index()) device = lockstep::local_device();
  lockstep::set_device(device);
  lockstep::InitOptions options;
  options.backend = backend;
  auto world = lockstep::init_process_group(options);
  const auto job = lockstep::testing::read_pickle(job_path);
  const auto inputs = at_key(job, "inputs").toTensor(), targets = at_key(job, "targets").toTensor();
  const bool half = at_key(job, "half").toBool();
  const auto weights = lockstep::from_object<Tensors>(at_key(job, "weights"));
  auto net = std::make_shared<Net>();
  {
    const torch::NoGradGuard no_grad;
    // Rank 0's alone: DistributedDataParallel gives them to the others.
    for (size_t i = 0; i < weights.size() && world.rank() == 0; ++i) net->parameters()[i].copy_(weights[i]);
  }
  net->to(device);
  // Some buckets, not one.
  lockstep::DistributedDataParallel<Net> model(net, {.bucket_cap_mb = 0.001});
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  lockstep::GradScaler scaler({.device = device.type(), .init_scale = 1024, .enabled = half});
  const int64_t share = inputs.size(1) / world.size();
  std::vector<double> losses;
  for (int64_t step = 0; step < inputs.size(0); ++step) {
    const auto x = inputs[step].narrow(0, world.rank() * share, share).to(device);
    const auto y = targets[step].narrow(0, world.rank() * share, share).to(device);
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      auto guard = lockstep::autocast(device.type(), {.dtype = at::kHalf, .enabled = half});
      loss = torch::mse_loss(model(x), y);
    }
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
    losses.push_back(loss.item<double>());
  }
  Tensors trained;
  for (const auto& parameter : net->parameters()) trained.push_back(parameter.detach().cpu());
  lockstep::testing::write_pickle(
      output + "." + std::to_string(world.rank()),
      lockstep::to_object(lockstep::StateDict{{"weights", lockstep::to_object(trained)},
                                              {"losses", lockstep::to_object(losses)}}));
}

}  // namespace

LOCKSTEP_DRIVER(device_parity_driver) {
  TORCH_CHECK(argc == 5, "usage: device_parity_driver JOB OUTPUT DEVICE BACKEND");
  run(argv[1], argv[2], c10::Device(argv[3]), argv[4]);
  return 0;
}

}  // namespace device_parity_driver
