// The program of docs/from_spawn_to_several_hosts.md, as it is after each of the three steps.
//
//     from_spawn_driver 1|2|3
#include <iostream>
#include <memory>
#include <string>

#include <torch/torch.h>

#include <lockstep/lockstep.h>
#include <lockstep/testing/driver.h>

namespace from_spawn_driver {
namespace {

struct Net : torch::nn::Module {
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(10, 1));
  torch::Tensor forward(const torch::Tensor& x) { return layer(x); }
};

// ---- Step 1

void train(int rank) {
  auto world = lockstep::init_process_group();
  torch::manual_seed(0);  // the same data and weights on all ranks
  const auto inputs = torch::randn({1024, 10});
  const lockstep::data::TensorDataset data(inputs, inputs.sum(1, /*keepdim=*/true));
  lockstep::data::DistributedSampler sampler(data.size());  // this rank's share
  lockstep::data::DataLoader loader(data, {.batch_size = 32, .sampler = &sampler});
  lockstep::DistributedDataParallel<Net> model(std::make_shared<Net>());
  torch::optim::SGD optimizer(model.parameters(), /*lr=*/0.05);
  for (int epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);
    torch::Tensor loss;
    for (auto& batch : loader) {
      optimizer.zero_grad();
      loss = torch::mse_loss(model(batch.data), batch.target);
      loss.backward();  // averages the gradients
      optimizer.step();
    }
    if (rank == 0) std::cout << "epoch " << epoch << ": loss " << loss.item<float>() << std::endl;
  }
}

// ---- Step 2

void step_2() {
  auto world = lockstep::init_process_group();
  const int rank = world.rank();
  torch::manual_seed(0);  // the same data and weights on all ranks
  const auto inputs = torch::randn({1024, 10});
  const lockstep::data::TensorDataset data(inputs, inputs.sum(1, /*keepdim=*/true));
  lockstep::data::DistributedSampler sampler(data.size());  // this rank's share
  lockstep::data::DataLoader loader(data, {.batch_size = 32, .sampler = &sampler});
  lockstep::DistributedDataParallel<Net> model(std::make_shared<Net>());
  torch::optim::SGD optimizer(model.parameters(), /*lr=*/0.05);
  for (int epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);
    torch::Tensor loss;
    for (auto& batch : loader) {
      optimizer.zero_grad();
      loss = torch::mse_loss(model(batch.data), batch.target);
      loss.backward();  // averages the gradients
      optimizer.step();
    }
    if (rank == 0) std::cout << "epoch " << epoch << ": loss " << loss.item<float>() << std::endl;
  }
}

// ---- Step 3

void step_3() {
  auto world = lockstep::init_process_group();
  const int rank = world.rank();
  torch::manual_seed(0);  // the same data and weights on all ranks
  const auto inputs = torch::randn({1024, 10});
  const lockstep::data::TensorDataset data(inputs, inputs.sum(1, /*keepdim=*/true));
  lockstep::data::DistributedSampler sampler(data.size());  // this rank's share
  lockstep::data::DataLoader loader(data, {.batch_size = 32, .sampler = &sampler});
  lockstep::DistributedDataParallel<Net> model(std::make_shared<Net>());
  torch::optim::SGD optimizer(model.parameters(), /*lr=*/0.05);
  lockstep::TrainingState training;
  training.add_model("model", model);
  training.add_optimizer("optimizer", optimizer, model);
  lockstep::CheckpointManager checkpoints({.directory = "run"});  // a folder that all hosts share
  int64_t epoch = 0;
  if (const auto last = checkpoints.restore(training)) epoch = last->epoch;
  for (; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);
    torch::Tensor loss;
    for (auto& batch : loader) {
      optimizer.zero_grad();
      loss = torch::mse_loss(model(batch.data), batch.target);
      loss.backward();  // averages the gradients
      optimizer.step();
    }
    if (rank == 0) std::cout << "epoch " << epoch << ": loss " << loss.item<float>() << std::endl;
    checkpoints.save(training, {.step = epoch + 1, .epoch = epoch + 1});
  }
}

}  // namespace

LOCKSTEP_DRIVER(from_spawn_driver) {
  if (argc != 2) return 2;
  const std::string step = argv[1];
  if (step == "1") lockstep::spawn(train, 2);
  if (step == "2") step_2();
  if (step == "3") step_3();
  return 0;
}

}  // namespace from_spawn_driver
