// PyTorch's DDP tutorials as they stand: main() starts world_size processes by spawn(); each sets MASTER_ADDR
// and MASTER_PORT, joins the group under its rank, and trains.
//
//     ./spawn --world-size 2 --epochs 3
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/lockstep.h>

namespace {

struct Settings {
  int world_size = 2;
  int epochs = 3;
  int64_t batch_size = 32;  // of each rank
  int master_port = 12355;
};

struct ToyModel : torch::nn::Module {
  torch::nn::Linear net1 = register_module("net1", torch::nn::Linear(10, 10));
  torch::nn::Linear net2 = register_module("net2", torch::nn::Linear(10, 5));
  torch::Tensor forward(const torch::Tensor& x) { return net2(torch::relu(net1(x))); }
};

/// The same on all ranks: torch's generator has the same seed in each.
lockstep::data::TensorDataset<2> make_data() {
  const auto inputs = torch::randn({1024, 10});
  return lockstep::data::TensorDataset(inputs, inputs.matmul(torch::randn({10, 5})));
}

lockstep::DefaultGroup setup(int rank, const Settings& settings) {
  ::setenv("MASTER_ADDR", "localhost", 1);
  ::setenv("MASTER_PORT", std::to_string(settings.master_port).c_str(), 1);
  return lockstep::init_process_group({.rank = rank, .world_size = settings.world_size});
}

void train(int rank, const Settings& settings) {
  auto world = setup(rank, settings);  // the group ends with it
  torch::manual_seed(0);
  const auto data = make_data();
  lockstep::data::DistributedSampler sampler(data.size());  // this rank's share
  lockstep::data::DataLoader loader(data, {.batch_size = settings.batch_size, .sampler = &sampler});

  lockstep::DistributedDataParallel<ToyModel> model(std::make_shared<ToyModel>());
  torch::optim::SGD optimizer(model.parameters(), /*lr=*/0.05);
  for (int epoch = 0; epoch < settings.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    torch::Tensor loss;
    for (auto& batch : loader) {
      optimizer.zero_grad();
      loss = torch::mse_loss(model(batch.data), batch.target);
      loss.backward();  // averages the gradients over the ranks
      optimizer.step();
    }
    loss = loss.detach();
    lockstep::all_reduce(loss, lockstep::ReduceOp::AVG);
    if (rank == 0) std::cout << "epoch " << epoch + 1 << ": loss " << loss.item<float>() << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app("Trains a small network on processes of its own, as PyTorch's tutorials start them.");
  app.add_option("--world-size", settings.world_size, "processes")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--epochs", settings.epochs)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "samples of each process")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--master-port", settings.master_port, "where the processes meet")
      ->check(CLI::Range(1, 65535))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  lockstep::spawn(train, settings.world_size, settings);
} catch (const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  std::cerr << "spawn: " << (torchs != nullptr ? torchs->what_without_backtrace() : error.what())
            << std::endl;
  return 1;
}
