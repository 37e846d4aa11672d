// Times Lockstep's collectives, as scripts/bench commands; by hand, for a profiler:
//
//     lockstep run --nproc-per-node 2 bench_all_reduce all_reduce 26214400 100 5
//
// Operations: all_reduce, broadcast, all_gather (tensors in shared memory), all_reduce_staged (a plain
// tensor), barrier. The argument is the size of each rank's tensor in bytes; a barrier takes 0.
#include <iostream>
#include <optional>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>

#include "command_loop.h"

namespace {

using lockstep::bench::Command;
using lockstep::bench::Timings;

// Below it, reading the processor clock (a system call) would disturb what is measured.
constexpr int64_t kCpuTimeFromBytes = 1 << 20;

/// A buffer that grows to the largest size asked for; smaller ones are its beginning.
class Buffer {
 public:
  explicit Buffer(bool shared) : shared_(shared) {}

  at::Tensor first(int64_t elements) {
    if (!memory_.defined() || memory_.numel() < elements) {
      memory_ = at::Tensor();  // give back before taking more
      memory_ = shared_ ? lockstep::empty_shared({elements}, at::kFloat) : at::empty({elements}, at::kFloat);
    }
    return memory_.narrow(0, 0, elements);
  }

 private:
  bool shared_;
  at::Tensor memory_;
};

// What rank `rank` contributes in iteration i: small whole numbers, whose sums are exact.
float contribution(int64_t i, int rank) {
  return static_cast<float>(i % 5 + rank + 1);
}

void check_ends(const at::Tensor& tensor, float expected, const std::string& operation) {
  const float* data = tensor.const_data_ptr<float>();
  for (const float value : {data[0], data[tensor.numel() - 1]}) {
    TORCH_CHECK(value == expected, operation, " gave ", value, " instead of ", expected);
  }
}

class Collectives {
 public:
  Collectives(int rank, int size) : rank_(rank), size_(size) {}

  Timings measure(const Command& command) {
    if (command.operation == "barrier") return measure_barrier(command);
    const int64_t bytes = std::stoll(command.argument);
    TORCH_CHECK_VALUE(bytes > 0 && bytes % 4 == 0, "the size is ", bytes,
                      " bytes; it must be a multiple of 4");
    if (command.operation == "all_reduce") return measure_all_reduce(command, shared_.first(bytes / 4));
    if (command.operation == "all_reduce_staged") return measure_all_reduce(command, plain_.first(bytes / 4));
    if (command.operation == "broadcast") return measure_broadcast(command, shared_.first(bytes / 4));
    if (command.operation == "all_gather") return measure_all_gather(command, bytes / 4);
    TORCH_CHECK_VALUE(false, "there is no operation '", command.operation, "'");
  }

 private:
  Timings measure_barrier(const Command& command) {
    return timed(
        command, false, [](int64_t) {}, [] { lockstep::barrier(); }, [](int64_t) {});
  }

  Timings measure_all_reduce(const Command& command, const at::Tensor& tensor) {
    return timed(
        command, tensor.nbytes() >= kCpuTimeFromBytes,
        [&](int64_t i) { tensor.fill_(contribution(i, rank_)); }, [&] { lockstep::all_reduce(tensor); },
        [&](int64_t i) {
          float expected = 0;
          for (int rank = 0; rank < size_; ++rank) expected += contribution(i, rank);
          check_ends(tensor, expected, command.operation);
        });
  }

  Timings measure_broadcast(const Command& command, const at::Tensor& tensor) {
    return timed(
        command, tensor.nbytes() >= kCpuTimeFromBytes,
        [&](int64_t i) { tensor.fill_(contribution(i, rank_)); }, [&] { lockstep::broadcast(tensor, 0); },
        [&](int64_t i) { check_ends(tensor, contribution(i, 0), command.operation); });
  }

  Timings measure_all_gather(const Command& command, int64_t elements) {
    const at::Tensor input = shared_.first(elements);
    const at::Tensor all = gathered_.first(elements * size_);
    std::vector<at::Tensor> outputs = all.chunk(size_);
    return timed(
        command, input.nbytes() >= kCpuTimeFromBytes, [&](int64_t i) { input.fill_(contribution(i, rank_)); },
        [&] { lockstep::all_gather(outputs, input); },
        [&](int64_t i) {
          for (int rank = 0; rank < size_; ++rank)
            check_ends(outputs[rank], contribution(i, rank), command.operation);
        });
  }

  // Each iteration: fresh data, a barrier, the operation under the clock, a look at the result.
  template <class Prepare, class Operation, class Check>
  static Timings timed(const Command& command, bool with_cpu, Prepare prepare, Operation operation,
                       Check check) {
    Timings timings;
    timings.wall.reserve(command.iterations);
    for (int64_t i = -command.warmup; i < command.iterations; ++i) {
      const int64_t number = i + command.warmup;
      prepare(number);
      lockstep::barrier();
      const int64_t cpu = with_cpu ? lockstep::bench::cpu_clock() : 0;
      const int64_t begin = lockstep::bench::wall_clock();
      operation();
      const int64_t end = lockstep::bench::wall_clock();
      if (i >= 0) {
        timings.wall.push_back(end - begin);
        if (with_cpu) timings.cpu.push_back(lockstep::bench::cpu_clock() - cpu);
      }
      check(number);
    }
    return timings;
  }

  int rank_, size_;
  Buffer shared_{true}, plain_{false}, gathered_{true};
};

}  // namespace

int main(int argc, char** argv) try {
  at::set_num_threads(1);
  auto world = lockstep::init_process_group(lockstep::bench::init_options());
  Collectives collectives(world.rank(), world.size());
  return lockstep::bench::serve(argc, argv, world.rank(),
                                [&](const Command& command) { return collectives.measure(command); });
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
