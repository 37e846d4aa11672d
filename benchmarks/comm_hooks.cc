// Measures communication hooks of DistributedDataParallel against its own all-reduce, as scripts/bench
// commands; by hand:
//
//     lockstep run --nproc-per-node 2 bench_comm_hooks step:bf16 large 20 2
//
// Commands:
//     step:HOOK NETWORK ITERATIONS WARMUP      times training steps
//     traffic:HOOK NETWORK ITERATIONS WARMUP   counts the bytes that a rank hands to collectives in a step
//     accuracy:HOOK SEED EPOCHS 0              trains on Fashion-MNIST (LOCKSTEP_DATA_DIR), one time for all
//                                              epochs; answers with the test accuracy
// HOOK is one of kHooks below; all_reduce is DistributedDataParallel without a hook.
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <torch/torch.h>

#include <lockstep/base/environment.h>
#include <lockstep/lockstep.h>
#include <lockstep/parallel/ddp/hooks/default_hooks.h>
#include <lockstep/parallel/ddp/hooks/powersgd_hook.h>
#include <lockstep/parallel/ddp/hooks/quantization_hooks.h>

#include "command_loop.h"
#include "fashion_mnist_accuracy.h"
#include "init_options.h"
#include "networks.h"
#include "traffic.h"
#include "trainer.h"

namespace {

using lockstep::benchmarks::Command;
using lockstep::benchmarks::DdpModel;
using lockstep::benchmarks::Timings;
using lockstep::benchmarks::Trainer;

// PowerSGD begins with plain all-reduces. PyTorch's default of 1,000 steps is more than these trainings have.
constexpr int64_t kPowerSgdStart = 10;
constexpr int64_t kPowerSgdRank = 2;

using Register = void (*)(DdpModel&);
const std::map<std::string, Register> kHooks = {
    {"all_reduce", [](DdpModel&) {}},
    {"fp16", [](DdpModel& model) { model.register_comm_hook(nullptr, lockstep::fp16_compress_hook); }},
    {"bf16", [](DdpModel& model) { model.register_comm_hook(nullptr, lockstep::bf16_compress_hook); }},
    {"int8",
     [](DdpModel& model) { model.register_comm_hook(nullptr, lockstep::quantization_pertensor_hook); }},
    {"power_sgd", [](DdpModel& model) {
       const lockstep::PowerSGDOptions options = {.matrix_approximation_rank = kPowerSgdRank,
                                                  .start_powerSGD_iter = kPowerSgdStart};
       model.register_comm_hook(lockstep::PowerSGDState(nullptr, options), lockstep::powerSGD_hook);
     }}};

std::string known_hooks() {
  std::string names;
  for (const auto& [name, add] : kHooks) names += (names.empty() ? "" : ", ") + name;
  return names;
}

/// "step:bf16": what is measured, and of which hook.
std::pair<std::string, std::string> parse(const std::string& operation) {
  const auto colon = operation.find(':');
  const std::string what = operation.substr(0, colon);
  const std::string hook = colon == std::string::npos ? "" : operation.substr(colon + 1);
  TORCH_CHECK_VALUE(what == "step" || what == "traffic" || what == "accuracy", "'", operation,
                    "' is no command; do: step:HOOK, traffic:HOOK or accuracy:HOOK");
  TORCH_CHECK_VALUE(kHooks.count(hook) == 1, "'", operation, "' names no hook; there are ", known_hooks());
  return {what, hook};
}

class Measurements {
 public:
  Timings measure(const Command& command) {
    const auto [what, hook] = parse(command.operation);
    if (what == "accuracy") return accuracy(hook, command);
    Trainer& trainer = trainer_for(command.argument, hook);
    return what == "step" ? time_steps(trainer, command, lockstep::benchmarks::Company::kAll)
                          : traffic(trainer, command);
  }

 private:
  Trainer& trainer_for(const std::string& network, const std::string& hook) {
    auto& trainer = trainers_[{network, hook}];
    if (!trainer) {
      trainer = std::make_unique<Trainer>(lockstep::benchmarks::find_network(network),
                                          lockstep::DistributedDataParallelOptions{});
      kHooks.at(hook)(*trainer->ddp());
      settle(*trainer);
    }
    return *trainer;
  }

  static Timings traffic(Trainer& trainer, const Command& command) {
    trainer.prepare_batches(command.warmup + command.iterations);
    for (int64_t i = 0; i < command.warmup; ++i) trainer.step(i);
    const int64_t before = lockstep::benchmarks::wall_clock();
    const auto counted = lockstep::benchmarks::count_traffic([&] {
      for (int64_t i = 0; i < command.iterations; ++i) trainer.step(command.warmup + i);
    });
    Timings timings;
    timings.wall = {(lockstep::benchmarks::wall_clock() - before) / command.iterations};
    const auto per_step = [&](int64_t bytes) {
      return static_cast<double>(bytes) / static_cast<double>(command.iterations);
    };
    timings.facts = {{"input_bytes", per_step(counted.inputs)}, {"output_bytes", per_step(counted.outputs)}};
    trainer.rest();
    return timings;
  }

  static Timings accuracy(const std::string& hook, const Command& command) {
    Timings timings;
    const int64_t before = lockstep::benchmarks::wall_clock();
    timings.facts["accuracy"] = lockstep::benchmarks::fashion_mnist_accuracy(
        std::stoll(command.argument), command.iterations, kHooks.at(hook));
    timings.wall = {lockstep::benchmarks::wall_clock() - before};
    return timings;
  }

  std::map<std::pair<std::string, std::string>, std::unique_ptr<Trainer>> trainers_;
};

}  // namespace

int main(int argc, char** argv) {
  return lockstep::benchmarks::run([&] {
    at::set_num_threads(1);
    // The flight records, by which traffic is counted, go where the driver clears up.
    if (const auto channel = lockstep::environment::text(lockstep::benchmarks::kChannel)) {
      ::setenv("LOCKSTEP_FLIGHT_DIR", channel->c_str(), /*overwrite=*/1);
    }
    auto world = lockstep::init_process_group(lockstep::benchmarks::init_options());
    torch::manual_seed(world.rank());  // each rank has its own data
    Measurements measurements;
    return lockstep::benchmarks::serve(argc, argv, world.rank(),
                                       [&](const Command& command) { return measurements.measure(command); });
  });
}
