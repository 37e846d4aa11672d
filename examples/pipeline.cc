// A network 784-512-256-128-10 cut into two partitions, which compute at once on a batch's micro-batches:
// Pipe, in one process, on Fashion-MNIST.
//
//     ./pipeline                              # 4 and 3 of its 7 layers, on two threads of the CPU
//     ./pipeline --devices cuda:0 cuda:1
//     ./pipeline --faulty                     # the balance that is often printed for this network, and what is wrong with it
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/device/device.h>
#include <lockstep/lockstep.h>
#include <lockstep/parallel/pipeline/balance.h>
#include <lockstep/parallel/pipeline/pipe.h>

namespace {

namespace nn = torch::nn;
using lockstep::data::FashionMnist;

struct Settings {
  int64_t epochs = 3;
  int64_t batch_size = 128;
  int64_t chunks = 8;
  int64_t seed = 0;
  std::vector<int64_t> balance{4, 3};
  std::string balance_by;
  std::vector<std::string> devices{"cpu", "cpu"};
  std::string data = "/usr/share/datasets/fashion-mnist";  // where Debian's dataset-fashion-mnist puts it
  bool plain = false;
  bool faulty = false;
};

nn::Sequential make_net(const Settings& settings) {
  torch::manual_seed(settings.seed);
  return nn::Sequential{nn::Linear(784, 512), nn::ReLU(), nn::Linear(512, 256), nn::ReLU(),
                        nn::Linear(256, 128), nn::ReLU(), nn::Linear(128, 10)};
}

std::vector<at::Device> devices_of(const Settings& settings) {
  std::vector<at::Device> devices;
  for (const auto& name : settings.devices) devices.emplace_back(name);
  lockstep::set_device(devices.front());  // before anything asks torch about CUDA
  return devices;
}

std::vector<int64_t> balance_of(const Settings& settings, const nn::Sequential& net) {
  if (settings.faulty) return {2, 2, 2};  // 6 of 7 layers, and a partition more than there are devices
  const auto partitions = static_cast<int64_t>(settings.devices.size());
  const auto batch = torch::rand({settings.batch_size, 784});
  if (settings.balance_by == "time")
    return lockstep::balance_by_time(partitions, net, batch.chunk(settings.chunks)[0]);
  if (settings.balance_by == "size")
    return lockstep::balance_by_size(partitions, net, batch, {.chunks = settings.chunks, .param_scale = 4});
  return settings.balance;
}

/// The share of all test images that are classified right.
template <class Model>
double test_accuracy(Model& model, FashionMnist& test, at::Device first) {
  const torch::NoGradGuard no_grad;
  int64_t right = 0;
  constexpr int64_t kBatch = 500;
  for (int64_t begin = 0; begin < test.size(); begin += kBatch) {
    std::vector<int64_t> indices;
    for (int64_t i = begin; i < std::min(test.size(), begin + kBatch); ++i) indices.push_back(i);
    const auto batch = test.get_batch(indices);
    right += model.forward(batch.data.flatten(1).to(first))
                 .argmax(1)
                 .cpu()
                 .eq(batch.target)
                 .sum()
                 .template item<int64_t>();
  }
  return static_cast<double>(right) / static_cast<double>(test.size());
}

/// Batches go to the first device; the outputs are on the last.
template <class Model>
void train(const Settings& settings, Model& model, at::Device first, at::Device last) {
  FashionMnist train_set(settings.data, /*train=*/true);
  FashionMnist test_set(settings.data, /*train=*/false);
  torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(1e-3));
  lockstep::data::DataLoader loader(
      train_set,
      {.batch_size = settings.batch_size, .shuffle = true, .num_workers = 1, .seed = settings.seed});
  double accuracy = 0;
  for (int64_t epoch = 1; epoch <= settings.epochs; ++epoch) {
    for (auto& batch : loader) {
      optimizer.zero_grad();
      const auto output = model.forward(batch.data.flatten(1).to(first));
      nn::functional::cross_entropy(output, batch.target.to(last)).backward();
      optimizer.step();
    }
    accuracy = test_accuracy(model, test_set, first);
    std::printf("epoch %lld: test accuracy %.4f\n", static_cast<long long>(epoch), accuracy);
    std::fflush(stdout);
  }
  std::printf("test accuracy: %.4f\n", accuracy);
}

void run(const Settings& settings) {
  const auto devices = devices_of(settings);
  auto net = make_net(settings);
  if (settings.plain) {
    net->to(devices[0]);
    train(settings, *net, devices[0], devices[0]);
    return;
  }
  const auto balance = balance_of(settings, net);
  lockstep::Pipe model(net, balance, {.devices = devices, .chunks = settings.chunks});
  std::cout << "balance: " << at::IntArrayRef(balance) << std::endl;
  train(settings, model, model.devices().front(), model.devices().back());
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app("Trains a classifier on Fashion-MNIST, cut into partitions that compute at once.");
  app.add_option("--epochs", settings.epochs, "passes over the data")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "images a step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--chunks", settings.chunks, "micro-batches a step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--balance", settings.balance, "layers of each partition")->capture_default_str();
  app.add_option("--balance-by", settings.balance_by, "finds the balance: by the layers' time or size")
      ->check(CLI::IsMember({"time", "size"}));
  app.add_option("--devices", settings.devices, "one for each partition: cpu cpu …, or cuda:0 cuda:1 …")
      ->capture_default_str();
  app.add_option("--seed", settings.seed, "of the weights and the order of the images")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--data", settings.data, "folder with the four IDX files")->capture_default_str();
  app.add_flag("--plain", settings.plain, "without Pipe, on the first device, for comparison");
  app.add_flag("--faulty", settings.faulty, "with the balance 2 2 2, to see the error");
  CLI11_PARSE(app, argc, argv);
  run(settings);
} catch (const c10::Error& error) {
  std::cerr << "pipeline: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "pipeline: " << error.what() << std::endl;
  return 1;
}
