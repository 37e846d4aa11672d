// Layers of one module on two devices, plainly: the second device waits for the first, and the first for the
// second. Alone, or with data parallelism beside it: each rank has two devices and a share of the batch, and
// DistributedDataParallel averages the gradients of both. On the CPU both devices are the same one.
//
//     ./model_parallel --devices cuda:0 cuda:1
//     lockstep run --nproc-per-node 2 ./model_parallel --ddp             # the CPU
//     lockstep run --nproc-per-node 2 ./model_parallel --ddp --devices cuda
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/base/environment.h>
#include <lockstep/device/device.h>
#include <lockstep/lockstep.h>
#include <lockstep/rendezvous/launch_environment.h>

namespace {

namespace nn = torch::nn;

struct Settings {
  int64_t steps = 50;
  int64_t batch_size = 48;
  int64_t seed = 0;
  std::vector<std::string> devices{"cpu"};
  bool ddp = false;
};

/// Its first layer is on one device, its last on the other; what goes from one to the other is moved by hand.
struct ToyModel : nn::Module {
  ToyModel(at::Device first, at::Device last) : first_device(first), last_device(last) {
    first_layer->to(first);
    last_layer->to(last);
    to(at::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last_layer(torch::relu(first_layer(x.to(first_device))).to(last_device));
  }
  at::Device first_device, last_device;
  nn::Linear first_layer = register_module("first_layer", nn::Linear(10, 32));
  nn::Linear last_layer = register_module("last_layer", nn::Linear(32, 5));
};

/// Two devices for this rank: those that are named, or of "cuda" the numbers 2·LOCAL_RANK and 2·LOCAL_RANK +
/// 1.
std::vector<at::Device> devices_of(const Settings& settings) {
  std::vector<at::Device> devices;
  for (const auto& name : settings.devices) devices.emplace_back(name);
  if (devices.size() == 1 && devices[0].is_cuda() && !devices[0].has_index()) {
    const auto first = static_cast<at::DeviceIndex>(
        2 * std::max(0, lockstep::read_launch_environment(lockstep::environment::text).local_rank));
    devices = {{at::kCUDA, first}, {at::kCUDA, static_cast<at::DeviceIndex>(first + 1)}};
  }
  TORCH_CHECK(devices.size() <= 2, "--devices names ", devices.size(), " devices; the module has two parts");
  lockstep::set_device(devices.front());  // before anything asks torch about CUDA
  devices.resize(2, devices.front());
  return devices;
}

/// `model` is the module or its wrapper; part `part` of `parts` of each batch is this process's.
template <class Model>
void train(const Settings& settings, Model& model, at::Device last, int part, int parts) {
  torch::manual_seed(settings.seed + 1);
  const auto inputs = torch::randn({settings.batch_size, 10}, torch::kDouble);
  const auto targets = torch::sin(inputs.narrow(1, 0, 5));
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::Tensor loss;
  for (int64_t step = 0; step < settings.steps; ++step) {
    optimizer.zero_grad();
    loss = torch::mse_loss(model.forward(inputs.chunk(parts)[part]), targets.chunk(parts)[part].to(last));
    loss.backward();
    optimizer.step();
  }
  loss = loss.detach().cpu();
  if (parts > 1) lockstep::all_reduce(loss, lockstep::ReduceOp::AVG);
  if (part == 0)
    std::printf("loss after %lld steps: %.12f\n", static_cast<long long>(settings.steps),
                loss.item<double>());
}

void run(const Settings& settings) {
  const auto devices = devices_of(settings);
  torch::manual_seed(settings.seed);
  auto net = std::make_shared<ToyModel>(devices[0], devices[1]);
  if (!settings.ddp) {
    train(settings, *net, devices[1], 0, 1);
    return;
  }
  auto world = lockstep::init_process_group();
  TORCH_CHECK(settings.batch_size % world.size() == 0, "--batch-size ", settings.batch_size,
              " must be a multiple of the ", world.size(), " ranks, for means over ranks to be means");
  lockstep::DistributedDataParallel<ToyModel> model(net);  // device_ids stay empty: the module has several
  train(settings, model, devices[1], world.rank(), world.size());
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app("Trains a module whose layers are on two devices.");
  app.add_option("--steps", settings.steps, "optimizer steps")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "samples a step, all ranks together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", settings.seed, "of the weights and the data")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--devices", settings.devices,
                 "two of this process, or one: cpu, cuda (two cards for each rank), cuda:0 cuda:1")
      ->capture_default_str();
  app.add_flag("--ddp", settings.ddp, "with DistributedDataParallel, under lockstep run");
  CLI11_PARSE(app, argc, argv);
  run(settings);
} catch (const c10::Error& error) {
  std::cerr << "model_parallel: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "model_parallel: " << error.what() << std::endl;
  return 1;
}
