// Trains a classifier of clothes on Fashion-MNIST with the Trainer: AdamW, a cosine schedule, clipping,
// validation, TensorBoard, MLflow, checkpoints. Started again with the same --run, it goes on where it was.
// docs/trainer.md walks through it.
//
//     lockstep run --nproc-per-node 2 ./trainer --run first
#include <cstdio>
#include <iostream>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/lockstep.h>
#include <lockstep/observe/summary_writer.h>
#ifdef EXAMPLE_WITH_MLFLOW
#include <lockstep/mlflow/mlflow_writer.h>
#endif

#include "device_option.h"

namespace {

namespace nn = torch::nn;
using lockstep::data::Example;
using lockstep::data::FashionMnist;

struct Settings {
  std::string data = "/usr/share/datasets/fashion-mnist";  // where Debian's dataset-fashion-mnist puts it
  std::filesystem::path run = "run";
  std::string mlflow = {};
  int64_t epochs = 5;
  int64_t batch_size = 128;
  double learning_rate = 1e-3;
  std::string device = "auto";
};

/// 784-256-10.
struct Net : nn::Module {
  torch::Tensor forward(const torch::Tensor& images) {
    return output(torch::relu(hidden(images.flatten(1))));
  }
  nn::Linear hidden = register_module("hidden", nn::Linear(784, 256));
  nn::Linear output = register_module("output", nn::Linear(256, 10));
};

/// The loss of a batch, and how much of it is classified right.
lockstep::StepOutput loss_of(const torch::Tensor& scores, const torch::Tensor& labels) {
  const auto right = scores.argmax(1).eq(labels).to(torch::kFloat).mean();
  return {.loss = nn::functional::cross_entropy(scores, labels),
          .metrics = {{"accuracy", right.item<double>()}}};
}

int train(const Settings& settings) {
  const auto device = use_device(settings.device);  // first of all
  auto world = lockstep::init_process_group();
  TORCH_CHECK(settings.batch_size % world.size() == 0, "--batch-size ", settings.batch_size,
              " is for the whole job and must be a multiple of its ", world.size(), " ranks");
  const int64_t batch_size = settings.batch_size / world.size();

  torch::manual_seed(0);
  auto net = std::make_shared<Net>();
  net->to(device);
  lockstep::DistributedDataParallel model(net);
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(settings.learning_rate));
  lockstep::lr_scheduler::CosineAnnealingLR schedule(optimizer, /*T_max=*/settings.epochs);

  FashionMnist images(settings.data, /*train=*/true);
  lockstep::data::DistributedSampler sampler(images.size());
  // The Trainer brings batches to the model's device.
  lockstep::data::DataLoader loader(
      images,
      {.batch_size = batch_size, .sampler = &sampler, .num_workers = 1, .pin_memory = device.is_cuda()});
  FashionMnist test_images(settings.data, /*train=*/false);
  lockstep::data::DistributedEvalSampler test_sampler(test_images.size());
  lockstep::data::DataLoader test_loader(test_images, {.batch_size = 500, .sampler = &test_sampler});

  std::vector<std::shared_ptr<lockstep::MetricsWriter>> writers = {
      std::make_shared<lockstep::SummaryWriter>(settings.run / "tensorboard")};
  if (!settings.mlflow.empty()) {
#ifdef EXAMPLE_WITH_MLFLOW
    writers.push_back(std::make_shared<lockstep::MlflowWriter>(
        lockstep::MlflowWriterOptions{.tracking_uri = settings.mlflow, .experiment_name = "fashion-mnist"}));
#else
    TORCH_CHECK(false, "--mlflow: this build has no Lockstep::mlflow; it needs libcurl");
#endif
  }

  lockstep::Trainer trainer(
      model, optimizer, loader,
      [](auto& net, const Example& batch) { return loss_of(net.forward(batch.data), batch.target); },
      {.max_epochs = settings.epochs,
       .clip_grad_norm = 1.0,
       .scheduler = &schedule,
       .checkpoint = lockstep::CheckpointManagerOptions{.directory = settings.run / "checkpoints",
                                                        .every_epochs = 1,
                                                        .keep_last = 2,
                                                        .metric = "validation/loss"},
       .writers = writers,
       .hyperparameters = {{"lr", settings.learning_rate}, {"batch_size", settings.batch_size}},
       .callbacks = {{.after_epoch = [](lockstep::TrainerCore& core) {
         if (core.rank() != 0) return;
         std::printf("epoch %lld: loss %.4f, test accuracy %.4f\n", static_cast<long long>(core.epoch()),
                     core.metrics().at("epoch/loss"), core.metrics().at("validation/accuracy"));
         std::fflush(stdout);
       }}}});
  trainer.validate_on(test_loader);
  return lockstep::RobustLoop(trainer).run();
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app(
      "Trains a classifier with the Trainer. Start it with: lockstep run --nproc-per-node N trainer …");
  app.add_option("--data", settings.data, "folder with the four IDX files")->capture_default_str();
  app.add_option("--run", settings.run, "folder for checkpoints and TensorBoard's files")
      ->capture_default_str();
  app.add_option("--mlflow", settings.mlflow, "an MLflow server, http://127.0.0.1:5000 for example");
  app.add_option("--epochs", settings.epochs, "passes over the data")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "images a step, all ranks together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--learning-rate", settings.learning_rate, "AdamW's, at the begin")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  add_device_option(app, settings.device);
  CLI11_PARSE(app, argc, argv);
  return train(settings);
} catch (const c10::Error& error) {
  std::cerr << "trainer: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "trainer: " << error.what() << std::endl;
  return 1;
}
