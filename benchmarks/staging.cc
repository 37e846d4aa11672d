// Times all_reduce of memory on a device that ranks share, and the copies that it can't do without, as
// scripts/bench commands; by hand, with two ranks on one card:
//
//     LOCKSTEP_BENCH_DEVICE=cuda:0 lockstep run --nproc-per-node 2 bench_staging all_reduce 67108864 10 2
//
// The argument is the tensor's size in bytes. The operations:
//     all_reduce  of a float32 tensor on the device
//     copies      the tensor into pinned memory and back, by all ranks at the same time: what the bus allows
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/data/pin_memory.h>
#include <lockstep/device/accelerator.h>

#include "bench_device.h"
#include "command_loop.h"
#include "init_options.h"

namespace {

using lockstep::benchmarks::Command;
using lockstep::benchmarks::Timings;

/// Each iteration ends when the device has done it.
template <class Action>
Timings time_each(const Command& command, c10::Device device, const Action& action) {
  for (int64_t i = 0; i < command.warmup; ++i) action();
  lockstep::synchronize(device);
  lockstep::barrier();
  Timings timings;
  int64_t before = lockstep::benchmarks::wall_clock();
  for (int64_t i = 0; i < command.iterations; ++i) {
    action();
    lockstep::synchronize(device);
    const int64_t now = lockstep::benchmarks::wall_clock();
    timings.wall.push_back(now - before);
    before = now;
  }
  return timings;
}

Timings measure(const Command& command, c10::Device device) {
  const int64_t numbers = std::stoll(command.argument) / 4;
  TORCH_CHECK_VALUE(numbers > 0, command.argument, " bytes hold no number; give at least 4");
  // Zeros stay what they are however often they are added.
  at::Tensor tensor = at::full({numbers}, 0.0, at::TensorOptions(device).dtype(at::kFloat));
  if (command.operation == "all_reduce") {
    return time_each(command, device, [&] { lockstep::all_reduce(tensor); });
  }
  TORCH_CHECK_VALUE(command.operation == "copies", "there is no operation '", command.operation,
                    "'; there are all_reduce and copies");
  at::Tensor host = at::full({numbers}, 0.0, at::kFloat);
  if (!device.is_cpu()) host = lockstep::data::pin_memory(host);
  return time_each(command, device, [&] {
    host.copy_(tensor, /*non_blocking=*/true);
    tensor.copy_(host, /*non_blocking=*/true);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::benchmarks::run([&] {
    const auto device = lockstep::benchmarks::use_device();
    at::set_num_threads(1);
    auto world = lockstep::init_process_group(lockstep::benchmarks::init_options());
    return lockstep::benchmarks::serve(argc, argv, world.rank(),
                                       [&](const Command& command) { return measure(command, device); });
  });
}
