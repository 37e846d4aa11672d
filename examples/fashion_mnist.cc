// Trains a classifier of clothes on Fashion-MNIST, data-parallel, with a test accuracy after each epoch.
//
//     lockstep run --nproc-per-node 2 ./fashion_mnist
#include <chrono>
#include <cstdio>
#include <iostream>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "device_option.h"

namespace {

namespace nn = torch::nn;
using lockstep::data::FashionMnist;

struct Settings {
  std::string model = "mlp";
  int64_t epochs = 15;
  int64_t batch_size = 128;
  std::string data = "/usr/share/datasets/fashion-mnist";  // where Debian's dataset-fashion-mnist puts it
  int64_t seed = 0;
  double learning_rate = 1e-3;
  std::string device = "auto";
};

/// 784-256-10.
nn::Sequential make_mlp() {
  return nn::Sequential(nn::Flatten(), nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 10));
}

/// Two convolutions with batch normalisation, then a linear classifier.
nn::Sequential make_cnn() {
  const auto convolution = [](int64_t in, int64_t out) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1).bias(false));
  };
  return nn::Sequential(convolution(1, 16), nn::BatchNorm2d(16), nn::ReLU(), nn::MaxPool2d(2),   //
                        convolution(16, 32), nn::BatchNorm2d(32), nn::ReLU(), nn::MaxPool2d(2),  //
                        nn::Flatten(), nn::Linear(32 * 7 * 7, 10));
}

/// A Sequential whose forward takes and returns a tensor, as DistributedDataParallel wants it.
struct Net : nn::Module {
  explicit Net(const std::string& kind) : layers(kind == "cnn" ? make_cnn() : make_mlp()) {
    register_module("layers", layers);
  }
  torch::Tensor forward(const torch::Tensor& images) { return layers->forward(images); }
  nn::Sequential layers;
};

/// The share of all test images that are classified right. Each rank takes every N-th image, so that each
/// image counts exactly once (a DistributedSampler would repeat some to make the shares equal); the counts
/// are summed over the ranks.
double test_accuracy(Net& net, FashionMnist& test, torch::Device device, int rank, int world_size) {
  torch::NoGradGuard no_grad;
  net.eval();
  auto counts = torch::zeros({2}, torch::device(device).dtype(torch::kLong));  // right, seen
  constexpr int64_t kBatch = 500;
  const int64_t size = test.size();
  for (int64_t begin = rank; begin < size; begin += kBatch * world_size) {
    std::vector<int64_t> indices;
    for (int64_t i = begin; i < std::min(size, begin + kBatch * world_size); i += world_size)
      indices.push_back(i);
    const auto batch = lockstep::data::to_device(test.get_batch(indices), device);
    counts[0] += net.forward(batch.data).argmax(1).eq(batch.target).sum();
    counts[1] += static_cast<int64_t>(indices.size());
  }
  net.train();
  lockstep::all_reduce(counts);
  return counts[0].item<double>() / counts[1].item<double>();
}

void train(const Settings& settings) {
  const auto device = use_device(settings.device);  // first of all
  auto world = lockstep::init_process_group();
  const int rank = world.rank();
  const int world_size = world.size();
  TORCH_CHECK(settings.batch_size % world_size == 0, "--batch-size ", settings.batch_size,
              " is for the whole job and must be a multiple of its ", world_size, " ranks");
  const int64_t batch_size = settings.batch_size / world_size;

  FashionMnist train_set(settings.data, /*train=*/true);
  FashionMnist test_set(settings.data, /*train=*/false);

  torch::manual_seed(settings.seed);
  auto net = std::make_shared<Net>(settings.model);
  net->to(device);
  lockstep::DistributedDataParallel<Net> model(net);
  torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(settings.learning_rate));

  lockstep::data::DistributedSampler sampler(train_set.size(), {.seed = settings.seed, .drop_last = true});
  lockstep::data::DataLoader host_loader(train_set, {.batch_size = batch_size,
                                                     .sampler = &sampler,
                                                     .num_workers = 1,
                                                     .drop_last = true,
                                                     .pin_memory = device.is_cuda()});
  lockstep::data::DeviceLoader loader(host_loader, device);  // on the CPU it hands on what it gets

  TORCH_CHECK(loader.size() > 0, "the ", train_set.size(), " training images don't fill one batch of ",
              settings.batch_size, "; give a smaller --batch-size");

  double accuracy = 0;
  for (int64_t epoch = 0; epoch < settings.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    const auto start = std::chrono::steady_clock::now();
    int64_t images = 0;
    {
      lockstep::ProgressBar bar(
          loader.size() * settings.batch_size,
          "epoch " + std::to_string(epoch + 1) + "/" + std::to_string(settings.epochs),
          {.unit = "images", .quiet = rank != 0, .waited = [&] { return loader.waited(); }});
      for (auto& batch : loader) {
        optimizer.zero_grad();
        auto loss = nn::functional::cross_entropy(model(batch.data), batch.target);
        loss.backward();
        optimizer.step();
        images += settings.batch_size;
        bar.set_postfix("loss", loss.item<double>());
        bar.update(settings.batch_size);
      }
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    accuracy = test_accuracy(*net, test_set, device, rank, world_size);
    if (rank == 0) {
      std::printf("epoch %lld: %.1f s, %.0f images/s, test accuracy %.4f\n",
                  static_cast<long long>(epoch + 1), seconds, static_cast<double>(images) / seconds,
                  accuracy);
      std::fflush(stdout);
    }
  }
  if (rank == 0) std::printf("test accuracy: %.4f\n", accuracy);
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app(
      "Trains a classifier on Fashion-MNIST. Start it with: lockstep run --nproc-per-node N fashion_mnist …");
  app.add_option("--model", settings.model, "mlp (784-256-10) or cnn")
      ->check(CLI::IsMember({"mlp", "cnn"}))
      ->capture_default_str();
  app.add_option("--epochs", settings.epochs, "passes over the data")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "images a step, all ranks together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--data", settings.data, "folder with the four IDX files")->capture_default_str();
  app.add_option("--seed", settings.seed, "of the weights and the shuffle")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--learning-rate", settings.learning_rate, "Adam's")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  add_device_option(app, settings.device);
  CLI11_PARSE(app, argc, argv);
  train(settings);
} catch (const c10::Error& error) {
  std::cerr << "fashion_mnist: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "fashion_mnist: " << error.what() << std::endl;
  return 1;
}
