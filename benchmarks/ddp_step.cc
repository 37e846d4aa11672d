// Times training steps of a C++ program, with and without DistributedDataParallel, as scripts/bench commands;
// by hand:
//
//     lockstep run --nproc-per-node 2 bench_ddp_step ddp large 20 2
//
// Modes: ddp (with the bucket sizes that DistributedDataParallel chooses itself); ddp_bf16 and ddp_int8 (the
// same with gradients in so few bits between hosts); fixed (with PyTorch's sizes: 1 MiB, then 25); alone (the
// same processes at the same time, without communication); abreast (as alone, with a barrier after each step,
// which shows what waiting for the slower rank costs); single (as alone, but only the rank that is told so
// works). The argument is a network of networks.h. Those with DDP answer with what get_ddp_logging_data() says,
// too. LOCKSTEP_BENCH_DEVICE=cuda:0 puts the networks there.
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "bench_device.h"
#include "command_loop.h"
#include "init_options.h"
#include "networks.h"
#include "trainer.h"

namespace {

using lockstep::DistributedDataParallelOptions;
using lockstep::HostCompression;
using lockstep::benchmarks::Command;
using lockstep::benchmarks::Company;
using lockstep::benchmarks::Timings;
using lockstep::benchmarks::Trainer;

struct Mode {
  std::optional<DistributedDataParallelOptions> options = {};  // none: no communication
  Company company = Company::kAll;
};

Mode find_mode(const std::string& name) {
  if (name == "ddp") return {.options = DistributedDataParallelOptions{}};
  if (name == "ddp_bf16") {
    return {.options = DistributedDataParallelOptions{.between_hosts = HostCompression::kBf16}};
  }
  if (name == "ddp_int8") {
    return {.options = DistributedDataParallelOptions{.between_hosts = HostCompression::kInt8}};
  }
  // PyTorch's sizes when the user says nothing.
  if (name == "fixed") {
    return {.options = DistributedDataParallelOptions{.bucket_cap_mb = 25, .first_bucket_cap_mb = 1}};
  }
  if (name == "alone") return {};
  if (name == "abreast") return {.company = Company::kAbreast};
  if (name == "single") return {.company = Company::kNone};
  TORCH_CHECK_VALUE(false, "there is no mode '", name,
                    "'; there are ddp, ddp_bf16, ddp_int8, fixed, alone, abreast and single");
}

class Trainers {
 public:
  explicit Trainers(c10::Device device) : device_(device) {}

  Timings measure(const Command& command) {
    const Mode mode = find_mode(command.operation);
    // What runs without communication is one trainer, whatever else runs beside it.
    auto& trainer = trainers_[{command.argument, mode.options ? command.operation : "alone"}];
    if (!trainer) {
      trainer = std::make_unique<Trainer>(lockstep::benchmarks::find_network(command.argument), mode.options,
                                          device_);
      if (mode.options) settle(*trainer);
    }
    Timings timings = time_steps(*trainer, command, mode.company);
    if (trainer->ddp() != nullptr) {
      const auto numbers = trainer->ddp()->get_ddp_logging_data().ints_map;
      timings.facts = {numbers.begin(), numbers.end()};
    }
    return timings;
  }

 private:
  c10::Device device_;
  std::map<std::pair<std::string, std::string>, std::unique_ptr<Trainer>> trainers_;
};

}  // namespace

int main(int argc, char** argv) {
  return lockstep::benchmarks::run([&] {
    const auto device = lockstep::benchmarks::use_device();
    at::set_num_threads(1);
    auto world = lockstep::init_process_group(lockstep::benchmarks::init_options());
    torch::manual_seed(world.rank());  // each rank has its own data
    Trainers trainers(device);
    return lockstep::benchmarks::serve(argc, argv, world.rank(),
                                       [&](const Command& command) { return trainers.measure(command); });
  });
}
