// Trains the convolutional network of fashion_mnist.cc in bfloat16, float16 or float32 with autocast and a
// GradScaler, data-parallel, and prints what it cost: accuracy, images/s, the scale, skipped steps.
//
//     lockstep run --nproc-per-node 2 ./mixed_precision --dtype bf16
#include <algorithm>
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
  at::ScalarType dtype = at::kBFloat16;
  at::Device device = at::kCPU;
  int64_t epochs = 3;
  int64_t batch_size = 128;
  int64_t samples = 60000;
  std::string data = "/usr/share/datasets/fashion-mnist";  // where Debian's dataset-fashion-mnist puts it
  int64_t seed = 0;
  double learning_rate = 1e-3;
  double init_scale = 65536;
};

/// Two convolutions with batch normalisation, then a linear classifier. Its parameters are float32
/// throughout.
struct Net : nn::Module {
  Net() { register_module("layers", layers); }
  torch::Tensor forward(const torch::Tensor& images) { return layers->forward(images); }

  static nn::Conv2d convolution(int64_t in, int64_t out) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1).bias(false));
  }
  nn::Sequential layers{convolution(1, 16),  nn::BatchNorm2d(16),       nn::ReLU(), nn::MaxPool2d(2),  //
                        convolution(16, 32), nn::BatchNorm2d(32),       nn::ReLU(), nn::MaxPool2d(2),  //
                        nn::Flatten(),       nn::Linear(32 * 7 * 7, 10)};
};

/// For a forward and its loss. float32 needs no autocast.
lockstep::Autocast mixed_precision(const Settings& settings) {
  if (settings.dtype == at::kFloat) return lockstep::autocast(settings.device.type(), {.enabled = false});
  return lockstep::autocast(settings.device.type(), {.dtype = settings.dtype});
}

/// The share of all test images that are classified right, in the dtype of the training.
double test_accuracy(const Settings& settings, Net& net, int rank, int world_size) {
  torch::NoGradGuard no_grad;
  auto guard = mixed_precision(settings);
  net.eval();
  FashionMnist test(settings.data, /*train=*/false);
  auto counts = torch::zeros({2}, torch::device(settings.device).dtype(torch::kLong));  // right, seen
  constexpr int64_t kBatch = 500;
  const int64_t size = test.size();
  for (int64_t begin = rank; begin < size; begin += kBatch * world_size) {
    std::vector<int64_t> indices;
    for (int64_t i = begin; i < std::min(size, begin + kBatch * world_size); i += world_size)
      indices.push_back(i);
    const auto batch = lockstep::data::to_device(test.get_batch(indices), settings.device);
    counts[0] += net.forward(batch.data).argmax(1).eq(batch.target).sum();
    counts[1] += static_cast<int64_t>(indices.size());
  }
  net.train();
  lockstep::all_reduce(counts);
  return counts[0].item<double>() / counts[1].item<double>();
}

void train(const Settings& settings, const std::shared_ptr<Net>& net) {
  const int rank = lockstep::get_rank();
  const int world_size = lockstep::get_world_size();
  lockstep::DistributedDataParallel<Net> model(net);
  torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(settings.learning_rate));
  // Only float16 is so narrow that gradients need a scale.
  lockstep::GradScaler scaler({.device = settings.device.type(),
                               .init_scale = settings.init_scale,
                               .enabled = settings.dtype == at::kHalf});

  FashionMnist train_set(settings.data, /*train=*/true);
  lockstep::data::DistributedSampler sampler(std::min(settings.samples, train_set.size()),
                                             {.seed = settings.seed, .drop_last = true});
  lockstep::data::DataLoader host_loader(train_set, {.batch_size = settings.batch_size / world_size,
                                                     .sampler = &sampler,
                                                     .num_workers = 1,
                                                     .drop_last = true,
                                                     .pin_memory = settings.device.is_cuda()});
  lockstep::data::DeviceLoader loader(host_loader, settings.device);
  TORCH_CHECK(loader.size() > 0, "the ", std::min(settings.samples, train_set.size()),
              " training images don't fill one batch of ", settings.batch_size,
              "; give a smaller --batch-size");

  int64_t skipped = 0;
  double accuracy = 0;
  for (int64_t epoch = 0; epoch < settings.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    const auto start = std::chrono::steady_clock::now();
    int64_t images = 0;
    for (auto& batch : loader) {
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        auto guard = mixed_precision(settings);
        loss = nn::functional::cross_entropy(model.forward(batch.data), batch.target);
      }
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      const double scale = scaler.get_scale();
      scaler.update();
      skipped += scaler.get_scale() < scale;
      images += settings.batch_size;
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    accuracy = test_accuracy(settings, *net, rank, world_size);
    if (rank != 0) continue;
    std::printf("epoch %lld: %.0f images/s, test accuracy %.4f, scale %.12g, skipped steps %lld\n",
                static_cast<long long>(epoch + 1), static_cast<double>(images) / seconds, accuracy,
                scaler.get_scale(), static_cast<long long>(skipped));
    std::fflush(stdout);
  }
  if (rank == 0) std::printf("test accuracy: %.4f\n", accuracy);
}

void run(const Settings& settings) {
  auto world = lockstep::init_process_group();
  TORCH_CHECK(settings.batch_size % world.size() == 0, "--batch-size ", settings.batch_size,
              " is for the whole job and must be a multiple of its ", world.size(), " ranks");
  torch::manual_seed(settings.seed);
  auto net = std::make_shared<Net>();
  net->to(settings.device);
  train(settings, net);
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app(
      "Trains in mixed precision on Fashion-MNIST. Start it with: lockstep run --nproc-per-node N "
      "mixed_precision …");
  std::string dtype = "bf16", device = "auto";
  app.add_option("--dtype", dtype, "what convolutions and products compute in: float32, bf16 or fp16")
      ->check(CLI::IsMember({"float32", "bf16", "fp16"}))
      ->capture_default_str();
  add_device_option(app, device);
  app.add_option("--epochs", settings.epochs, "passes over the data")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "images a step, all ranks together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--samples", settings.samples, "train on the first so many images")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--data", settings.data, "folder with the four IDX files")->capture_default_str();
  app.add_option("--seed", settings.seed, "of the weights and the shuffle")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--learning-rate", settings.learning_rate, "Adam's")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--init-scale", settings.init_scale, "of the losses, for fp16")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  settings.dtype = dtype == "float32" ? at::kFloat : dtype == "bf16" ? at::kBFloat16 : at::kHalf;
  settings.device = use_device(device);  // before anything else of torch's
  run(settings);
} catch (const c10::Error& error) {
  std::cerr << "mixed_precision: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "mixed_precision: " << error.what() << std::endl;
  return 1;
}
