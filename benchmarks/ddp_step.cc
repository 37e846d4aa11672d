// Times training steps of a C++ program, with and without DistributedDataParallel, as scripts/bench commands;
// by hand:
//
//     lockstep run --nproc-per-node 2 bench_ddp_step ddp large 20 2
//
// Modes: ddp; alone (the same processes at the same time, without communication); abreast (as alone, with a
// barrier after each step, which shows what waiting for the slower rank costs); single (as alone, but only
// the rank that is told so works). The argument is a network: large (1024-2048-2048-10, batch 128) or small
// (784-256-10, batch 64).
#include <iostream>
#include <map>
#include <memory>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "command_loop.h"
#include "init_options.h"

namespace {

using lockstep::bench::Command;
using lockstep::bench::Timings;

struct Network {
  std::vector<int64_t> widths;
  int64_t batch_size;
};
const std::map<std::string, Network> kNetworks = {{"large", {{1024, 2048, 2048, 10}, 128}},
                                                  {"small", {{784, 256, 10}, 64}}};

class Mlp : public torch::nn::Module {
 public:
  explicit Mlp(const std::vector<int64_t>& widths) {
    for (size_t i = 1; i < widths.size(); ++i) {
      layers_.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(widths[i - 1], widths[i])));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (size_t i = 0; i + 1 < layers_.size(); ++i) x = torch::relu(layers_[i](x));
    return layers_.back()(x);
  }

 private:
  std::vector<torch::nn::Linear> layers_;
};

/// A model with its optimizer and fresh batches.
class Trainer {
 public:
  Trainer(const Network& network, bool distributed)
      : network_(network),
        net_(std::make_shared<Mlp>(network.widths)),
        model_(distributed ? std::make_unique<lockstep::DistributedDataParallel<Mlp>>(net_) : nullptr),
        optimizer_(net_->parameters(), torch::optim::SGDOptions(0.01)) {}

  // The memory of earlier batches is written anew: what is measured should not depend on malloc's history.
  void prepare_batches(int64_t count) {
    const int64_t batch = network_.batch_size;
    if (!inputs_.defined() || inputs_.size(0) < count) {
      inputs_ = torch::empty({count, batch, network_.widths.front()});
      targets_ = torch::empty({count, batch}, torch::kLong);
    }
    inputs_.normal_();
    targets_.random_(0, network_.widths.back());
  }

  void step(int64_t batch) {
    optimizer_.zero_grad();
    const auto input = inputs_[batch];
    const auto output = model_ ? (*model_)(input) : net_->forward(input);
    loss_ = torch::nn::functional::cross_entropy(output, targets_[batch]);
    loss_.backward();
    optimizer_.step();
  }

  float loss() const { return loss_.item<float>(); }

 private:
  Network network_;
  std::shared_ptr<Mlp> net_;
  std::unique_ptr<lockstep::DistributedDataParallel<Mlp>> model_;  // null: no communication
  torch::optim::SGD optimizer_;
  torch::Tensor inputs_, targets_, loss_;
};

class Trainers {
 public:
  Timings measure(const Command& command) {
    const std::string& mode = command.operation;
    TORCH_CHECK_VALUE(mode == "ddp" || mode == "alone" || mode == "abreast" || mode == "single",
                      "there is no mode '", mode, "'");
    Trainer& trainer = trainer_for(command.argument, mode == "ddp");
    trainer.prepare_batches(command.warmup + command.iterations);
    for (int64_t i = 0; i < command.warmup; ++i) trainer.step(i);
    if (mode != "single") lockstep::barrier();
    Timings timings;
    timings.wall.reserve(command.iterations);
    int64_t before = lockstep::bench::wall_clock();
    for (int64_t i = 0; i < command.iterations; ++i) {
      trainer.step(command.warmup + i);
      if (mode == "abreast") lockstep::barrier();
      const int64_t now = lockstep::bench::wall_clock();
      timings.wall.push_back(now - before);
      before = now;
    }
    TORCH_CHECK(std::isfinite(trainer.loss()), "the loss is ", trainer.loss(),
                ": these steps computed nothing of use");
    return timings;
  }

 private:
  Trainer& trainer_for(const std::string& network, bool distributed) {
    const auto known = kNetworks.find(network);
    TORCH_CHECK_VALUE(known != kNetworks.end(), "there is no network '", network,
                      "'; there are large and small");
    auto& trainer = trainers_[{network, distributed}];
    if (!trainer) trainer = std::make_unique<Trainer>(known->second, distributed);
    return *trainer;
  }

  std::map<std::pair<std::string, bool>, std::unique_ptr<Trainer>> trainers_;
};

}  // namespace

int main(int argc, char** argv) try {
  at::set_num_threads(1);
  auto world = lockstep::init_process_group(lockstep::bench::init_options());
  torch::manual_seed(world.rank());  // each rank has its own data
  Trainers trainers;
  return lockstep::bench::serve(argc, argv, world.rank(),
                                [&](const Command& command) { return trainers.measure(command); });
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
