// Trains a classifier of clothes on Fashion-MNIST in shards: the weights lie once in the memory of the host, or, on
// devices, each rank has rows of them; gradients and optimizer state a rank keeps of the rows that it owns.
//
//     lockstep run --nproc-per-node 2 ./fsdp
#include <cstdio>
#include <iostream>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/checkpoint/python_checkpoint.h>
#include <lockstep/lockstep.h>

#include "device_option.h"

namespace {

namespace nn = torch::nn;
namespace fsdp = lockstep::fsdp;
using lockstep::data::FashionMnist;

struct Settings {
  int64_t epochs = 3;
  int64_t batch_size = 128;
  std::string data = "/usr/share/datasets/fashion-mnist";  // where Debian's dataset-fashion-mnist puts it
  std::string precision = "float16";
  std::string device = "auto";
  std::string save;
};

/// 784-256-10.
struct Net : nn::Module {
  nn::Linear fc1 = register_module("fc1", nn::Linear(784, 256));
  nn::Linear fc2 = register_module("fc2", nn::Linear(256, 10));
  torch::Tensor forward(const torch::Tensor& images) { return fc2(torch::relu(fc1(images.flatten(1)))); }
};

using Model = lockstep::FullyShardedDataParallel<Net>;

fsdp::MixedPrecision mixed_precision(const std::string& name) {
  if (name == "float32") return {};
  const auto dtype = name == "float16" ? torch::kHalf : torch::kBFloat16;
  return {.param_dtype = dtype, .reduce_dtype = dtype, .buffer_dtype = dtype};
}

/// The policy puts fc1 with its 200,960 parameters into a group of its own, whose gradients are reduced while backward goes
/// on; fc2, which is smaller than 100,000, is in the group of the whole.
Model create_fsdp_model(const std::string& precision, c10::Device device) {
  return Model(std::make_shared<Net>(), {.sharding_strategy = fsdp::ShardingStrategy::FULL_SHARD,
                                         .auto_wrap_policy = fsdp::size_based_auto_wrap_policy(100'000),
                                         .mixed_precision = mixed_precision(precision),
                                         .device_id = device,
                                         .sync_module_states = true});
}

/// The share of all test images that are classified right. Each rank takes every N-th image.
double test_accuracy(Model& model, FashionMnist& test, int rank, int world_size) {
  const torch::NoGradGuard no_grad;
  auto counts = torch::zeros({2}, torch::TensorOptions(torch::kLong).device(model.device()));  // right, seen
  constexpr int64_t kBatch = 500;
  const int64_t size = test.size();
  for (int64_t begin = rank; begin < size; begin += kBatch * world_size) {
    std::vector<int64_t> indices;
    for (int64_t i = begin; i < std::min(size, begin + kBatch * world_size); i += world_size)
      indices.push_back(i);
    const auto batch = test.get_batch(indices);
    counts[0] += model(batch.data).argmax(1).eq(batch.target.to(counts.device())).sum();
    counts[1] += static_cast<int64_t>(indices.size());
  }
  lockstep::all_reduce(counts);
  return counts[0].item<double>() / counts[1].item<double>();
}

void train(const Settings& settings) {
  const auto device = use_device(settings.device);  // first of all
  auto world = lockstep::init_process_group();
  const int rank = world.rank();
  FashionMnist train_set(settings.data, /*train=*/true);
  FashionMnist test_set(settings.data, /*train=*/false);

  auto model = create_fsdp_model(settings.precision, device);
  auto optimizer = model.make_optimizer<torch::optim::Adam>(torch::optim::AdamOptions(1e-3));
  lockstep::GradScaler scaler({.device = device.type(), .enabled = settings.precision == "float16"});

  lockstep::data::DistributedSampler sampler(train_set.size(), {.drop_last = true});
  lockstep::data::DataLoader loader(train_set, {.batch_size = settings.batch_size / world.size(),
                                                .sampler = &sampler,
                                                .num_workers = 1,
                                                .drop_last = true});
  double accuracy = 0;
  for (int64_t epoch = 0; epoch < settings.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : loader) {
      optimizer->zero_grad();
      const auto loss =
          nn::functional::cross_entropy(model(batch.data).to(torch::kFloat), batch.target.to(device));
      scaler.scale(loss).backward();
      scaler.step(*optimizer);  // on all ranks, or on none
      scaler.update();
    }
    accuracy = test_accuracy(model, test_set, rank, world.size());
    if (rank == 0) {
      std::printf("epoch %lld: test accuracy %.4f\n", static_cast<long long>(epoch + 1), accuracy);
      std::fflush(stdout);
    }
  }
  if (rank == 0) std::printf("test accuracy: %.4f\n", accuracy);

  if (!settings.save.empty()) {
    const auto state = model.full_state_dict(/*rank0_only=*/true);  // all ranks call it
    if (rank == 0) lockstep::save_python_checkpoint(state, settings.save);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app(
      "Trains a classifier in shards on Fashion-MNIST. Start it with: lockstep run --nproc-per-node N fsdp "
      "…");
  app.add_option("--epochs", settings.epochs, "passes over the data")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "images a step, all ranks together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--data", settings.data, "folder with the four IDX files")->capture_default_str();
  app.add_option("--precision", settings.precision,
                 "in which forward and backward compute, and gradients travel")
      ->check(CLI::IsMember({"float16", "bfloat16", "float32"}))
      ->capture_default_str();
  app.add_option("--save", settings.save, "a file for the weights, which Python's torch.load() reads");
  add_device_option(app, settings.device);
  CLI11_PARSE(app, argc, argv);
  train(settings);
} catch (const c10::Error& error) {
  std::cerr << "fsdp: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "fsdp: " << error.what() << std::endl;
  return 1;
}
