// Times what the Profiler costs, as scripts/bench commands; by hand: bench_profiler add:plain 10000 5 1
//
// The argument is a number of operators, of merge a number of MiB. The operations:
//     add:off     additions of 4 floats, without a profiler
//     add:plain   while they are recorded      add:shapes   with record_shapes
//     add:memory  with profile_memory, too     add:stack    with with_stack, too
//     add:flops   with record_shapes and with_flops
//     scope       scopes of the program's own (RecordFunction) without a profiler; the argument is their number
//     export:HOW  from the end of what was recorded so to its file
//     merge:N     the traces of N ranks, each of so many MiB, into one file; the fact resident_bytes is the most that this
//                 process has held
//     phases      without a profiler: what a training step tells of its phases; the argument is a number of steps
// peers/python_profiler.py measures the same for torch.profiler, but for merge.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <lockstep/base/training/step_mark.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/flight/operation_observer.h>
#include <lockstep/profiler/merge_traces.h>
#include <lockstep/profiler/profiler.h>
#include <lockstep/profiler/record_function.h>

#include "command_loop.h"

namespace {

namespace fs = std::filesystem;

using lockstep::Profiler;
using lockstep::ProfilerOptions;
using lockstep::benchmarks::Command;
using lockstep::benchmarks::Timings;

/// A folder that is gone with this.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "lockstep-bench-XXXXXX").string();
    TORCH_CHECK(::mkdtemp(name.data()) != nullptr, "can't make the folder ", name);
    path_ = name;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void add(int64_t count) {
  static const at::Tensor numbers = at::ones({4});
  for (int64_t i = 0; i < count; ++i) at::add(numbers, numbers);
}

ProfilerOptions options_of(const std::string& how) {
  const bool flops = how == "flops", stack = how == "stack", memory = stack || how == "memory";
  const bool shapes = memory || flops || how == "shapes";
  TORCH_CHECK_VALUE(shapes || how == "plain", "'", how,
                    "' is no way to record; there are plain, shapes, flops, memory and stack");
  return {.record_shapes = shapes, .profile_memory = memory, .with_stack = stack, .with_flops = flops};
}

int64_t time_additions(const std::string& how, int64_t count) {
  std::optional<Profiler> profiler;
  if (how != "off") profiler.emplace(options_of(how));
  const int64_t before = lockstep::benchmarks::wall_clock();
  add(count);
  return lockstep::benchmarks::wall_clock() - before;
}

int64_t time_scopes(int64_t count) {
  const int64_t before = lockstep::benchmarks::wall_clock();
  for (int64_t i = 0; i < count; ++i) const lockstep::profiler::RecordFunction scope("augment");
  return lockstep::benchmarks::wall_clock() - before;
}

int64_t time_export(const std::string& how, int64_t count) {
  const Folder folder;
  Profiler profiler(options_of(how));
  add(count);
  const int64_t before = lockstep::benchmarks::wall_clock();
  profiler.stop();
  profiler.export_chrome_trace(folder.path() / "trace.json");
  return lockstep::benchmarks::wall_clock() - before;
}

/// A trace of rank 0, about as large, with an operation of all ranks for each hundred operators.
std::string trace_of(int64_t bytes, int ranks, const fs::path& folder) {
  constexpr int64_t kBytesOfOperator = 330;
  std::vector<int> all(static_cast<size_t>(ranks));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  lockstep::set_world_defaults({.rank = 0, .world_size = ranks});
  const auto group = std::make_shared<const lockstep::flight::ObservedGroup>(
      lockstep::flight::ObservedGroup{.name = "default", .ranks = all, .rank = 0, .key = "default"});
  const std::vector<at::Tensor> tensors = {at::ones({4})};
  lockstep::flight::ObservedOperation operation;
  operation.kind = "all_reduce";
  operation.inputs = operation.outputs = &tensors;
  Profiler profiler;
  for (int64_t i = 0; i < bytes / kBytesOfOperator / 100; ++i) {
    add(99);
    ++operation.sequence;
    const uint64_t id = lockstep::flight::scheduled(group, operation);
    lockstep::flight::started(id);
    lockstep::flight::completed(id);
  }
  profiler.stop();
  const std::string path = folder / "one.json";
  profiler.export_chrome_trace(path);
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The text without the zeros that say whose trace it is.
std::vector<std::string_view> pieces_between_ranks(std::string_view text) {
  std::vector<std::string_view> pieces;
  size_t from = 0;
  for (size_t at = 0; (at = text.find("ank\":", at)) != std::string_view::npos;) {
    at = text.find_first_not_of(' ', at + 5);
    pieces.push_back(text.substr(from, at - from));
    from = at + 1;
  }
  pieces.push_back(text.substr(from));
  return pieces;
}

/// What this process has held at most since the last call.
int64_t most_resident_bytes() {
  std::ifstream status("/proc/self/status");
  int64_t kilobytes = 0;
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") status >> kilobytes;
  }
  std::ofstream("/proc/self/clear_refs") << 5;
  return kilobytes << 10;
}

Timings time_merge(int ranks, int64_t mebibytes) {
  const Folder folder;
  fs::create_directory(folder.path() / "traces");
  int64_t bytes = 0;
  {
    const std::string first = trace_of(mebibytes << 20, ranks, folder.path());
    const std::vector<std::string_view> pieces = pieces_between_ranks(first);
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string name = "rank" + std::to_string(rank);
      std::ofstream file(folder.path() / "traces" / (name + ".1.pt.trace.json"));
      for (size_t i = 0; i < pieces.size(); ++i) {
        if (i > 0) file << rank;
        file << pieces[i];
      }
      bytes += static_cast<int64_t>(first.size());
    }
  }
  most_resident_bytes();
  Timings timings;
  const int64_t before = lockstep::benchmarks::wall_clock();
  const auto report = lockstep::profiler::merge_traces(folder.path() / "traces", folder.path() / "all.json");
  timings.wall.push_back(lockstep::benchmarks::wall_clock() - before);
  TORCH_CHECK(static_cast<int>(report.ranks.size()) == ranks && report.collectives > 0 && report.arrows > 0,
              "the merged trace lacks ranks or operations: ", lockstep::profiler::describe(report));
  timings.facts["resident_bytes"] = static_cast<double>(most_resident_bytes());
  timings.facts["bytes"] = static_cast<double>(bytes);
  return timings;
}

/// Steps that do nothing but tell of their phases: a batch, forward, backward, two buckets and an agreement to wait for.
Timings time_phases(int64_t steps, int64_t iterations) {
  const auto audience = std::make_shared<lockstep::PhaseAudience>();
  audience->board = std::make_shared<lockstep::PhaseBoard>();
  lockstep::begin_telling_phases(audience);
  const int loader = 0, model = 0;
  const auto take_step = [&] {
    lockstep::mark_step(lockstep::StepMark::kBatch, &loader);
    lockstep::enter_phase(lockstep::TrainingPhase::kForward);
    lockstep::count_samples(64);
    { const lockstep::WaitingPhase agreement; }
    lockstep::mark_step(lockstep::StepMark::kForward, &model);
    lockstep::enter_phase(lockstep::TrainingPhase::kBackward);
    lockstep::enter_phase(lockstep::TrainingPhase::kOptimizer);
    const lockstep::WaitingPhase waiting;
    for (int bucket = 0; bucket < 2; ++bucket) {
      const lockstep::WaitingPhase of_bucket;
    }
  };
  Timings timings;
  for (int64_t iteration = 0; iteration < iterations; ++iteration) {
    const int64_t wall = lockstep::benchmarks::wall_clock();
    const int64_t cpu = lockstep::benchmarks::cpu_clock();
    for (int64_t i = 0; i < steps; ++i) take_step();
    timings.cpu.push_back(lockstep::benchmarks::cpu_clock() - cpu);
    timings.wall.push_back(lockstep::benchmarks::wall_clock() - wall);
  }
  lockstep::end_telling_phases(audience);
  return timings;
}

Timings measure(const Command& command) {
  const size_t colon = command.operation.find(':');
  const std::string what = command.operation.substr(0, colon);
  const std::string how = colon == std::string::npos ? "" : command.operation.substr(colon + 1);
  const int64_t argument = std::stoll(command.argument);
  if (what == "merge") return time_merge(std::stoi(how), argument);
  if (what == "phases") return time_phases(argument, command.iterations);
  TORCH_CHECK_VALUE(what == "add" || what == "scope" || what == "export", "'", command.operation,
                    "' is no command; do: add:HOW, scope, export:HOW, merge:RANKS, phases");
  Timings timings;
  for (int64_t i = 0; i < command.warmup + command.iterations; ++i) {
    const int64_t took = what == "add"     ? time_additions(how, argument)
                         : what == "scope" ? time_scopes(argument)
                                           : time_export(how, argument);
    if (i >= command.warmup) timings.wall.push_back(took);
  }
  return timings;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::benchmarks::run(
      [&] { return lockstep::benchmarks::serve(argc, argv, /*rank=*/0, measure); });
}
