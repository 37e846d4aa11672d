// Times saving and loading checkpoints, as scripts/bench commands; by hand, for a profiler:
//
//     LOCKSTEP_BENCH_CHECKPOINTS=/tmp/x bench_checkpoint save:sync 1024 3 1
//
// The argument is the size of all tensors in MiB. The operations:
//     save:sync    save_checkpoint(), all on the disk     save:nosync    without fsync
//     load:verify  load_checkpoint(), then a byte of each page is read     load:plain    without checksums
//     async:now    what CheckpointManager::save() takes until it returns; the writing is not timed
//     async:later  the same with copy_later: save(), and finish_copy() after half a second of other work
// peers/python_checkpoint.py measures the same for torch.save and safetensors.
#include <chrono>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/ops/rand.h>
#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/process/cpu.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/checkpoint_manager.h>

#include "command_loop.h"

namespace {

namespace fs = std::filesystem;

using lockstep::StateDict;
using lockstep::benchmarks::Command;
using lockstep::benchmarks::Timings;

constexpr int64_t kTensors = 64;

struct Training {
  StateDict state;
  StateDict state_dict() const { return state; }
  StateDict rank_state_dict() const { return {}; }
};

StateDict make_state(int64_t mebibytes) {
  StateDict model;
  for (int64_t i = 0; i < kTensors; ++i) {
    model["layer" + std::to_string(i) + ".weight"] = at::rand({mebibytes * (1 << 20) / 4 / kTensors});
  }
  return {{"model", lockstep::to_object(model)}};
}

/// Reads a byte of each page, as a program that uses the tensors would touch them all.
double touch(const lockstep::LoadedCheckpoint& loaded) {
  double sum = 0;
  for (const auto& item : loaded.state.at("model").toGenericDict()) {
    const at::Tensor& tensor = item.value().toTensor();
    const auto* data = tensor.const_data_ptr<float>();
    for (int64_t i = 0; i < tensor.numel(); i += 1024) sum += data[i];
  }
  return sum;
}

int64_t bytes_in(const fs::path& directory) {
  int64_t bytes = 0;
  for (const auto& file : fs::directory_iterator(directory)) bytes += static_cast<int64_t>(file.file_size());
  return bytes;
}

class Measurements {
 public:
  Timings measure(const Command& command) {
    const int64_t mebibytes = std::stoll(command.argument);
    if (mebibytes != mebibytes_) {
      training_.state = make_state(mebibytes);
      mebibytes_ = mebibytes;
      fs::remove_all(root_ / "load");
    }
    Timings timings;
    for (int64_t i = 0; i < command.warmup + command.iterations; ++i) {
      prepare(command.operation);
      const int64_t cpu = lockstep::benchmarks::cpu_clock();
      const int64_t before = lockstep::benchmarks::wall_clock();
      run(command.operation);
      int64_t after = lockstep::benchmarks::wall_clock();
      if (manager_) {
        // As a forward and a backward would take; asleep, for what they do to the memory's speed is not ours.
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        const int64_t again = lockstep::benchmarks::wall_clock();
        manager_->finish_copy();
        after += lockstep::benchmarks::wall_clock() - again;
      }
      if (i >= command.warmup) {
        timings.wall.push_back(after - before);
        timings.cpu.push_back(lockstep::benchmarks::cpu_clock() - cpu);
      }
      finish(timings);
    }
    return timings;
  }

 private:
  void prepare(const std::string& operation) {
    if (operation.starts_with("load:") && !fs::exists(root_ / "load")) {
      lockstep::save_checkpoint(root_ / "load", training_.state, {}, {});
    }
    manager_.reset();
    if (operation.starts_with("async:")) {
      auto& manager = managers_[operation];
      if (!manager) {
        manager = std::make_shared<lockstep::CheckpointManager>(lockstep::CheckpointManagerOptions{
            .directory = root_ / "managed", .keep_last = 1, .copy_later = operation == "async:later"});
      }
      manager_ = manager;
    }
  }

  void run(const std::string& operation) {
    if (operation == "save:sync" || operation == "save:nosync") {
      lockstep::save_checkpoint(root_ / "save", training_.state, {}, {}, {.fsync = operation == "save:sync"});
    } else if (operation == "load:verify" || operation == "load:plain") {
      const auto loaded = lockstep::load_checkpoint(root_ / "load", {.verify = operation == "load:verify"});
      TORCH_CHECK(touch(loaded) > 0, "the checkpoint does not hold what was saved");
    } else if (operation == "async:now" || operation == "async:later") {
      manager_->save(training_, {.step = ++step_});
    } else {
      TORCH_CHECK_VALUE(
          false, "'", operation,
          "' is no command; do: save:sync, save:nosync, load:verify, load:plain, async:now, async:later");
    }
  }

  void finish(Timings& timings) {
    if (manager_) manager_->wait();
    if (!fs::exists(root_ / "save")) return;
    timings.facts["bytes_over_data"] =
        static_cast<double>(bytes_in(root_ / "save")) / static_cast<double>(mebibytes_ << 20);
    fs::remove_all(root_ / "save");
  }

  const fs::path root_ =
      fs::path(lockstep::environment::text("LOCKSTEP_BENCH_CHECKPOINTS").value_or("/tmp/lockstep-bench")) /
      "ours";
  Training training_;
  int64_t mebibytes_ = 0;
  int64_t step_ = 0;
  std::map<std::string, std::shared_ptr<lockstep::CheckpointManager>> managers_;
  std::shared_ptr<lockstep::CheckpointManager> manager_;  // of this iteration, if it has one
};

}  // namespace

int main(int argc, char** argv) try {
  at::set_num_threads(lockstep::usable_cores());  // for the copy of async:sync; nothing else uses them
  Measurements measurements;
  return lockstep::benchmarks::serve(argc, argv, /*rank=*/0,
                                     [&](const Command& command) { return measurements.measure(command); });
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
