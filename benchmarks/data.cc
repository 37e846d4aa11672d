// Times epochs of lockstep::data::DataLoader, as scripts/bench commands; by hand, for a profiler:
//
//     bench_data memory:0 16384 20 2
//
// The operation says what is loaded and by how many workers, the argument how many samples an epoch has:
//     memory:WORKERS SAMPLES    a TensorDataset of 784 float32 and a label, shuffled, in batches of 64
//     jpeg:WORKERS SAMPLES      an ImageFolder of photographs, see data_jpeg.h; with the component image
//     parquet:1 SAMPLES         rows of a Parquet file, see data_parquet.h; with the component parquet
// An iteration is one epoch, of persistent workers where there are some. peers/python_data.py measures the
// same for torch.utils.data.DataLoader. Another source is another entry of kSources.
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/rand.h>
#include <c10/util/Exception.h>

#include <lockstep/base/text/parse_number.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/data/datasets/tensor_dataset.h>

#include "command_loop.h"
#ifdef LOCKSTEP_BENCH_IMAGE
#include "data_jpeg.h"
#endif
#ifdef LOCKSTEP_BENCH_PARQUET
#include "data_parquet.h"
#endif

namespace {

using lockstep::benchmarks::Command;
using lockstep::benchmarks::Timings;

constexpr int64_t kBatchSize = 64;
constexpr int64_t kFeatures = 784;

/// Loads one epoch; answers with the sum of its labels.
using Epoch = std::function<int64_t()>;

lockstep::data::DataLoaderOptions options(int workers) {
  return {
      .batch_size = kBatchSize, .shuffle = true, .num_workers = workers, .persistent_workers = workers > 0};
}

/// The label of sample i is i.
Epoch memory(int workers, int64_t samples) {
  const auto data = at::rand({samples, kFeatures});
  const auto target = at::arange(samples, at::TensorOptions().dtype(at::kLong));
  auto loader = std::make_shared<lockstep::data::DataLoader<lockstep::data::TensorDataset<2>>>(
      lockstep::data::TensorDataset(data, target), options(workers));
  return [loader] {
    int64_t sum = 0;
    for (const auto& batch : *loader) {
      // As a training step would, look at all of the batch's labels, and at some of its data.
      const auto* labels = batch.target.const_data_ptr<int64_t>();
      for (int64_t i = 0; i < batch.target.size(0); ++i) sum += labels[i];
      TORCH_CHECK(batch.data.const_data_ptr<float>()[0] < 1, "no such number was put in");
    }
    return sum;
  };
}

using Source = Epoch (*)(int workers, int64_t samples);
const std::map<std::string, Source> kSources = {
    {"memory", memory},
#ifdef LOCKSTEP_BENCH_IMAGE
    {"jpeg",
     [](int workers, int64_t /*samples*/) { return lockstep::benchmarks::jpeg_epochs(options(workers)); }},
#endif
#ifdef LOCKSTEP_BENCH_PARQUET
    {"parquet",
     [](int workers, int64_t /*samples*/) {
       TORCH_CHECK_VALUE(workers == 1, "ParquetBatches reads ahead in one thread; do: parquet:1");
       return lockstep::benchmarks::parquet_epochs();
     }},
#endif
};

std::string names_of_sources() {
  std::string names;
  for (const auto& [name, source] : kSources) names += (names.empty() ? "" : ", ") + name + ":WORKERS";
  return names;
}

int64_t number(const std::string& word, const char* what) {
  const auto value = lockstep::parse_number<int64_t>(word);
  TORCH_CHECK_VALUE(value && *value >= 0, "'", word, "' is not a number of ", what);
  return *value;
}

class Measurements {
 public:
  Timings measure(const Command& command) {
    const Epoch& epoch = epoch_of(command.operation, command.argument);
    const int64_t samples = number(command.argument, "samples");
    Timings timings;
    for (int64_t i = 0; i < command.warmup + command.iterations; ++i) {
      const int64_t cpu = lockstep::benchmarks::cpu_clock();
      const int64_t before = lockstep::benchmarks::wall_clock();
      const int64_t sum = epoch();
      const int64_t after = lockstep::benchmarks::wall_clock();
      TORCH_CHECK(sum == samples * (samples - 1) / 2, "the epoch's labels add up to ", sum,
                  ": it did not have each sample once");
      if (i < command.warmup) continue;
      timings.wall.push_back(after - before);
      timings.cpu.push_back(lockstep::benchmarks::cpu_clock() - cpu);
    }
    return timings;
  }

 private:
  const Epoch& epoch_of(const std::string& operation, const std::string& argument) {
    auto& epoch = epochs_[{operation, argument}];
    if (!epoch) {
      const auto colon = operation.find(':');
      const auto source = kSources.find(operation.substr(0, colon));
      TORCH_CHECK_VALUE(source != kSources.end() && colon != std::string::npos, "'", operation,
                        "' is no command of this build; do: ", names_of_sources());
      const int64_t workers = number(operation.substr(colon + 1), "workers");
      epoch = source->second(static_cast<int>(workers), number(argument, "samples"));
    }
    return epoch;
  }

  std::map<std::pair<std::string, std::string>, Epoch> epochs_;
};

}  // namespace

int main(int argc, char** argv) {
  return lockstep::benchmarks::run([&] {
    at::set_num_threads(1);
    Measurements measurements;
    return lockstep::benchmarks::serve(argc, argv, /*rank=*/0,
                                       [&](const Command& command) { return measurements.measure(command); });
  });
}
