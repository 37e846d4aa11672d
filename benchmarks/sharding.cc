// Times training steps with AdamW in a FullyShardedDataParallel, in a DistributedDataParallel, and without communication, as
// scripts/bench commands; by hand:
//
//     lockstep run --nproc-per-node 2 bench_sharding fsdp huge 4 1
//
// Modes: fsdp (FULL_SHARD: shared on one host, gathered over several), gather and grad_op (FULL_SHARD and SHARD_GRAD_OP,
// gathered on one host, too), hybrid (HYBRID_SHARD), ddp, alone. The argument is a network of networks.h. A process has
// one mode and one network, for its memory is measured, too. peers/python_sharding.py does the same with PyTorch's
// fully_shard.
//
// operators:plain, operators:observed and operators:gathered time so many additions of 4 floats: as they are, while a
// model lives whose parameters are gathered, and given one of these parameters.
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "command_loop.h"
#include "init_options.h"
#include "networks.h"
#include "trainer.h"

namespace {

using lockstep::benchmarks::Batches;
using lockstep::benchmarks::Command;
using lockstep::benchmarks::Company;
using lockstep::benchmarks::Mlp;
using lockstep::benchmarks::Model;
using lockstep::benchmarks::Network;
using Sharded = lockstep::FullyShardedDataParallel<Model>;

/// Of the modes in which the model is sharded.
std::optional<lockstep::FullyShardedDataParallelOptions> sharded_options(const std::string& mode) {
  using lockstep::fsdp::ShardingStrategy;
  if (mode == "fsdp") return lockstep::FullyShardedDataParallelOptions{};
  if (mode == "gather")
    return lockstep::FullyShardedDataParallelOptions{.gather = true, .forward_prefetch = true};
  if (mode == "grad_op") {
    return lockstep::FullyShardedDataParallelOptions{
        .sharding_strategy = ShardingStrategy::SHARD_GRAD_OP, .gather = true, .forward_prefetch = true};
  }
  if (mode == "hybrid") {
    return lockstep::FullyShardedDataParallelOptions{.sharding_strategy = ShardingStrategy::HYBRID_SHARD};
  }
  return std::nullopt;
}

/// The layers that fully_shard is applied to in Python.
lockstep::fsdp::AutoWrapPolicy layers_of(const Model& net) {
  if (dynamic_cast<const Mlp*>(&net) != nullptr) {
    return lockstep::fsdp::module_wrap_policy<torch::nn::LinearImpl>();
  }
  return lockstep::fsdp::module_wrap_policy<torch::nn::TransformerEncoderLayerImpl>();
}

/// A network in one of the modes, with AdamW.
class ShardingTrainer {
 public:
  ShardingTrainer(const Network& network, const std::string& mode)
      : batches_(network, c10::Device(c10::kCPU)), net_(network.make()) {
    const torch::optim::AdamWOptions adamw(1e-3);
    if (auto options = sharded_options(mode)) {
      options->auto_wrap_policy = layers_of(*net_);
      options->sync_module_states = true;
      sharded_ = std::make_unique<Sharded>(net_, std::move(*options));
      optimizer_ = sharded_->make_optimizer<torch::optim::AdamW>(adamw);
      return;
    }
    TORCH_CHECK_VALUE(mode == "ddp" || mode == "alone", "there is no mode '", mode,
                      "'; there are fsdp, gather, grad_op, hybrid, ddp and alone");
    if (mode == "ddp") ddp_ = std::make_unique<lockstep::benchmarks::DdpModel>(net_);
    optimizer_ = std::make_unique<torch::optim::AdamW>(net_->parameters(), adamw);
  }

  void prepare_batches(int64_t count) { batches_.prepare(count); }
  void step(int64_t batch) {
    optimizer_->zero_grad();
    const auto input = batches_.input(batch);
    const auto output = sharded_ ? (*sharded_)(input) : ddp_ ? (*ddp_)(input) : net_->forward(input);
    loss_ = torch::nn::functional::cross_entropy(output, batches_.target(batch));
    loss_.backward();
    optimizer_->step();
  }
  void rest() { optimizer_->zero_grad(); }
  float loss() const { return loss_.item<float>(); }
  c10::Device device() const { return c10::Device(c10::kCPU); }

 private:
  Batches batches_;
  std::shared_ptr<Model> net_;
  std::unique_ptr<Sharded> sharded_;
  std::unique_ptr<lockstep::benchmarks::DdpModel> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  torch::Tensor loss_;
};

struct Adding : torch::nn::Module {
  torch::Tensor numbers = register_parameter("numbers", torch::ones({4}));
  void forward(int64_t count) {
    for (int64_t i = 0; i < count; ++i) at::add(numbers, numbers);
  }
};

lockstep::benchmarks::Timings time_operators(const Command& command) {
  const int64_t count = std::stoll(command.argument);
  const std::string how = command.operation.substr(command.operation.find(':') + 1);
  TORCH_CHECK_VALUE(how == "plain" || how == "observed" || how == "gathered", "there is no '",
                    command.operation, "'; do: operators:plain, operators:observed or operators:gathered");
  const torch::NoGradGuard no_grad;
  Adding plain;
  std::optional<lockstep::FullyShardedDataParallel<Adding>> gathered;
  if (how != "plain") {
    gathered.emplace(std::make_shared<Adding>(), lockstep::FullyShardedDataParallelOptions{.gather = true});
  }
  lockstep::benchmarks::Timings timings;
  for (int64_t i = 0; i < command.warmup + command.iterations; ++i) {
    const int64_t before = lockstep::benchmarks::wall_clock();
    how == "gathered" ? (*gathered)(count) : plain.forward(count);
    if (i >= command.warmup) timings.wall.push_back(lockstep::benchmarks::wall_clock() - before);
  }
  return timings;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::benchmarks::run([&] {
    at::set_num_threads(1);
    auto world = lockstep::init_process_group(lockstep::benchmarks::init_options());
    torch::manual_seed(world.rank());  // each rank has its own data
    std::optional<ShardingTrainer> trainer;
    std::string mode, network;
    return lockstep::benchmarks::serve(argc, argv, world.rank(), [&](const Command& command) {
      if (command.operation.starts_with("operators:")) return time_operators(command);
      if (!trainer) {
        mode = command.operation, network = command.argument;
        trainer.emplace(lockstep::benchmarks::find_network(network), mode);
        if (mode == "ddp") lockstep::benchmarks::settle(*trainer);
      }
      TORCH_CHECK_VALUE(mode == command.operation && network == command.argument, "this process has ", mode,
                        " of ", network, ", not ", command.operation, " of ", command.argument);
      return time_steps(*trainer, command, Company::kAll);
    });
  });
}
