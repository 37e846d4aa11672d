// Times Lockstep's collectives, as scripts/bench commands; by hand, for a profiler:
//
//     lockstep run --nproc-per-node 2 bench_collectives all_reduce 26214400 100 5
//
// Operations: those of kOperations below, on plain tensors; with _arena after the name on tensors in shared
// memory (lockstep::empty_shared), with _bf16 or _int8 in so few bits between hosts; barrier, whose argument is
// 0; and all_reduce_latency, which times one call of many in a row. The argument is the number of bytes on the
// larger side of a rank: of all outputs together for a gather, of all inputs for a scatter, of the message for
// send_recv (a round trip between ranks 2k and 2k+1). peers/gloo_collectives.py measures the same for torch.distributed.
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <lockstep/base/text/parse_number.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/host_compression.h>
#include <lockstep/collectives/process_group.h>

#include "command_loop.h"
#include "init_options.h"

namespace {

using lockstep::HostCompression;
using lockstep::benchmarks::Command;
using lockstep::benchmarks::Timings;

// Below it, reading the processor clock (a system call) would disturb what is measured.
constexpr int64_t kCpuTimeFromBytes = 1 << 20;
constexpr int64_t kCallsInARow = 200;
constexpr int kRoot = 0;  // of the operations that have one
constexpr float kLost =
    2.0f / 127;  // by int8, of a sum that is rounded once on each host and once as a whole
const std::string kArena = "_arena";
const std::map<std::string, HostCompression> kBetweenHosts = {{"_bf16", HostCompression::kBf16},
                                                              {"_int8", HostCompression::kInt8}};

/// Whether `name` had it at its end.
bool take_suffix(std::string& name, const std::string& suffix) {
  if (!name.ends_with(suffix)) return false;
  name.resize(name.size() - suffix.size());
  return true;
}

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

/// Where an operation is measured: `elements` on the larger side of this rank.
struct Setting {
  int rank;
  int size;
  int64_t elements;
  Buffer& input_buffer;
  Buffer& output_buffer;

  at::Tensor whole_input() const { return input_buffer.first(elements); }
  at::Tensor whole_output() const { return output_buffer.first(elements); }
  at::Tensor part_input() const { return input_buffer.first(elements / size); }
  at::Tensor part_output() const { return output_buffer.first(elements / size); }
};

// What rank `from` holds for rank or place `part` in iteration i: small whole numbers, whose sums are exact.
float value(int64_t i, int from, int part) {
  return static_cast<float>(i % 5 + from + 1 + 8 * part);
}

float sum_of_values(int64_t i, int ranks, int part) {
  float sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += value(i, rank, part);
  return sum;
}

/// An operation on memory that is there: inputs[p] receives value(i, rank, p), then run() is called, then
/// outputs[p] must hold expected(i, p). Lists are empty where a rank has nothing to give, or to get.
struct Case {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  std::function<void()> run;
  std::function<float(int64_t i, int part)> expected;

  void prepare(int64_t i, int rank) const {
    for (size_t part = 0; part < inputs.size(); ++part) inputs[part].fill_(value(i, rank, part));
  }
  /// `tolerance`: the part of what is expected by which it may be missed.
  void check(int64_t i, const std::string& operation, float tolerance) const {
    for (size_t part = 0; part < outputs.size(); ++part) {
      const at::Tensor& output = outputs[part];
      const float wanted = expected(i, static_cast<int>(part));
      const float* data = output.const_data_ptr<float>();
      for (const float seen : {data[0], data[output.numel() - 1]}) {
        TORCH_CHECK(std::abs(seen - wanted) <= tolerance * wanted, operation, " gave ", seen, " instead of ",
                    wanted, " in part ", part, " of its output");
      }
    }
  }
};

Case all_reduce_case(const Setting& at) {
  const at::Tensor data = at.whole_input();
  return {{data},
          {data},
          [=] { lockstep::all_reduce(data); },
          [size = at.size](int64_t i, int) { return sum_of_values(i, size, 0); }};
}

Case reduce_case(const Setting& at) {
  const at::Tensor data = at.whole_input();
  return {{data},
          at.rank == kRoot ? std::vector{data} : std::vector<at::Tensor>{},
          [=] { lockstep::reduce(data, kRoot); },
          [size = at.size](int64_t i, int) { return sum_of_values(i, size, 0); }};
}

Case broadcast_case(const Setting& at) {
  const at::Tensor data = at.whole_input();
  return {{data},
          {data},
          [=] { lockstep::broadcast(data, kRoot); },
          [](int64_t i, int) { return value(i, kRoot, 0); }};
}

Case all_gather_case(const Setting& at) {
  const at::Tensor input = at.part_input();
  const std::vector<at::Tensor> outputs = at.whole_output().chunk(at.size);
  return {{input},
          outputs,
          [=] { lockstep::all_gather(outputs, input); },
          [](int64_t i, int part) { return value(i, part, 0); }};
}

Case all_gather_into_tensor_case(const Setting& at) {
  const at::Tensor input = at.part_input(), output = at.whole_output();
  return {{input},
          output.chunk(at.size),
          [=] { lockstep::all_gather_into_tensor(output, input); },
          [](int64_t i, int part) { return value(i, part, 0); }};
}

Case gather_case(const Setting& at) {
  const at::Tensor input = at.part_input();
  std::vector<at::Tensor> outputs;
  if (at.rank == kRoot) outputs = at.whole_output().chunk(at.size);
  return {{input},
          outputs,
          [=] { lockstep::gather(input, outputs, kRoot); },
          [](int64_t i, int part) { return value(i, part, 0); }};
}

Case scatter_case(const Setting& at) {
  std::vector<at::Tensor> inputs;
  if (at.rank == kRoot) inputs = at.whole_input().chunk(at.size);
  const at::Tensor output = at.part_output();
  return {inputs,
          {output},
          [=] { lockstep::scatter(output, inputs, kRoot); },
          [rank = at.rank](int64_t i, int) { return value(i, kRoot, rank); }};
}

Case reduce_scatter_case(const Setting& at) {
  const std::vector<at::Tensor> inputs = at.whole_input().chunk(at.size);
  const at::Tensor output = at.part_output();
  return {inputs,
          {output},
          [=] { lockstep::reduce_scatter(output, inputs); },
          [rank = at.rank, size = at.size](int64_t i, int) { return sum_of_values(i, size, rank); }};
}

Case reduce_scatter_tensor_case(const Setting& at) {
  const at::Tensor input = at.whole_input(), output = at.part_output();
  return {input.chunk(at.size),
          {output},
          [=] { lockstep::reduce_scatter_tensor(output, input); },
          [rank = at.rank, size = at.size](int64_t i, int) { return sum_of_values(i, size, rank); }};
}

Case all_to_all_case(const Setting& at) {
  const std::vector<at::Tensor> inputs = at.whole_input().chunk(at.size),
                                outputs = at.whole_output().chunk(at.size);
  return {inputs, outputs, [=] { lockstep::all_to_all(outputs, inputs); },
          [rank = at.rank](int64_t i, int part) { return value(i, part, rank); }};
}

Case all_to_all_single_case(const Setting& at) {
  const at::Tensor input = at.whole_input(), output = at.whole_output();
  return {input.chunk(at.size), output.chunk(at.size), [=] { lockstep::all_to_all_single(output, input); },
          [rank = at.rank](int64_t i, int part) { return value(i, part, rank); }};
}

// A round trip of two messages: one way alone would time a send that need not wait for its receiver.
Case send_recv_case(const Setting& at) {
  TORCH_CHECK_VALUE(at.size % 2 == 0, "send_recv goes between pairs of ranks, and there are ", at.size,
                    " ranks; start an even number of them");
  const at::Tensor input = at.whole_input(), output = at.whole_output();
  const int peer = at.rank ^ 1;
  const bool first = at.rank < peer;
  return {{input},
          {output},
          [=] {
            if (first) lockstep::send(input, peer);
            lockstep::recv(output, peer);
            if (!first) lockstep::send(input, peer);
          },
          [peer](int64_t i, int) { return value(i, peer, 0); }};
}

const std::map<std::string, Case (*)(const Setting&)> kOperations = {
    {"all_reduce", all_reduce_case},
    {"reduce", reduce_case},
    {"broadcast", broadcast_case},
    {"all_gather", all_gather_case},
    {"all_gather_into_tensor", all_gather_into_tensor_case},
    {"gather", gather_case},
    {"scatter", scatter_case},
    {"reduce_scatter", reduce_scatter_case},
    {"reduce_scatter_tensor", reduce_scatter_tensor_case},
    {"all_to_all", all_to_all_case},
    {"all_to_all_single", all_to_all_single_case},
    {"send_recv", send_recv_case},
};

int64_t to_bytes(const std::string& text) {
  const auto bytes = lockstep::parse_number<int64_t>(text);
  TORCH_CHECK_VALUE(bytes && *bytes > 0 && *bytes % 4 == 0, "the size is '", text,
                    "'; it must be a number of bytes, and a multiple of 4");
  return *bytes;
}

class Collectives {
 public:
  Collectives(int rank, int size) : rank_(rank), size_(size) {}

  Timings measure(const Command& command) {
    if (command.operation == "barrier") return measure_barrier(command);
    const int64_t bytes = to_bytes(command.argument);
    if (command.operation == "all_reduce_latency") return measure_latency(command, bytes);
    const int64_t unit = 4 * size_;
    TORCH_CHECK_VALUE(bytes % unit == 0, "the size is ", bytes, " bytes; it must be a multiple of ", unit,
                      ", one number for each rank");
    std::string name = command.operation;
    const bool arena = take_suffix(name, kArena);
    std::optional<HostCompression> compression;
    for (const auto& [suffix, each] : kBetweenHosts) {
      if (take_suffix(name, suffix)) compression = each;
    }
    const lockstep::BetweenHosts between_hosts(compression, feedback_);
    const auto operation = kOperations.find(name);
    TORCH_CHECK_VALUE(operation != kOperations.end(), "there is no operation '", command.operation, "'");
    const Case what = operation->second(
        {rank_, size_, bytes / 4, arena ? arena_input_ : input_, arena ? arena_output_ : output_});
    return timed(
        command, bytes >= kCpuTimeFromBytes, [&](int64_t i) { what.prepare(i, rank_); }, what.run,
        [&](int64_t i) { what.check(i, command.operation, compression ? kLost : 0); });
  }

 private:
  Timings measure_barrier(const Command& command) {
    return timed(
        command, false, [](int64_t) {}, [] { lockstep::barrier(); }, [](int64_t) {});
  }

  // Calls in a row, each with fresh data and a look at its result: a clock for each call, and the barrier
  // before it, would weigh as much as what they time. An iteration's time is that of one call.
  Timings measure_latency(const Command& command, int64_t bytes) {
    const at::Tensor tensor = at::empty({bytes / 4}, at::kFloat);
    float* data = tensor.mutable_data_ptr<float>();
    const auto in_a_row = [&] {
      for (int64_t i = 0; i < kCallsInARow; ++i) {
        data[0] = value(i, rank_, 0);
        lockstep::all_reduce(tensor);
        TORCH_CHECK(data[0] == sum_of_values(i, size_, 0), command.operation, " gave ", data[0],
                    " instead of ", sum_of_values(i, size_, 0));
      }
    };
    Timings timings = timed(
        command, false, [&](int64_t) { tensor.zero_(); }, in_a_row, [](int64_t) {});
    for (int64_t& nanoseconds : timings.wall) nanoseconds /= kCallsInARow;
    return timings;
  }

  // Each iteration: fresh data, a barrier, the operation under the clock, a look at the result.
  template <class Prepare, class Operation, class Check>
  static Timings timed(const Command& command, bool with_cpu, Prepare prepare, const Operation& operation,
                       Check check) {
    Timings timings;
    timings.wall.reserve(command.iterations);
    for (int64_t i = -command.warmup; i < command.iterations; ++i) {
      const int64_t number = i + command.warmup;
      prepare(number);
      lockstep::barrier();
      const int64_t cpu = with_cpu ? lockstep::benchmarks::cpu_clock() : 0;
      const int64_t begin = lockstep::benchmarks::wall_clock();
      operation();
      const int64_t end = lockstep::benchmarks::wall_clock();
      if (i >= 0) {
        timings.wall.push_back(end - begin);
        if (with_cpu) timings.cpu.push_back(lockstep::benchmarks::cpu_clock() - cpu);
      }
      check(number);
    }
    return timings;
  }

  int rank_, size_;
  Buffer input_{false}, output_{false}, arena_input_{true}, arena_output_{true};
  const std::shared_ptr<lockstep::ErrorFeedback> feedback_ = std::make_shared<lockstep::ErrorFeedback>();
};

}  // namespace

int main(int argc, char** argv) {
  return lockstep::benchmarks::run([&] {
    at::set_num_threads(1);
    auto world = lockstep::init_process_group(lockstep::benchmarks::init_options());
    Collectives collectives(world.rank(), world.size());
    return lockstep::benchmarks::serve(argc, argv, world.rank(),
                                       [&](const Command& command) { return collectives.measure(command); });
  });
}
