// Times epochs over a Parquet file, row groups in a random order, for benchmarks/peers/python_parquet.py's
// Python.
//
// By hand: bench_parquet_loading batches rows.parquet 5 1
//
// The argument is a file that `python_parquet.py --write FILE` made. Each iteration is an epoch; its rows,
// summed, are the fact "rows", and a checksum of them "sum". Operations:
//     batches       ParquetBatches: batches of 256 rows, read ahead
//     loader        DataLoader over row groups with one worker, and RowGroupCollate: batches of 256 rows
//     row_groups    DataLoader over row groups with one worker, one row group a batch
#include <functional>
#include <iostream>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/parquet/parquet_batches.h>
#include <lockstep/parquet/row_group_collate.h>

#include "command_loop.h"

namespace {

using namespace lockstep::data;  // NOLINT(google-build-using-namespace): a program, not a header

constexpr int64_t kBatchSize = 256;

/// What a training would take of a batch, and a checksum, so that nobody skips the work.
struct Sums {
  double rows = 0;
  double sum = 0;
  void add(const Table& batch) {
    rows += static_cast<double>(batch.rows());
    sum += batch.tensor("label")[0].item<double>() + batch.tensor("x0")[batch.rows() - 1].item<double>() +
           static_cast<double>(batch["words"].values.size(0));
  }
};

std::function<void(Sums&)> epoch_of(const std::string& operation, const ParquetDataset& data,
                                    RowGroupSampler& sampler) {
  if (operation == "batches") {
    return [&](Sums& sums) {
      ParquetBatches batches(data, {.batch_size = kBatchSize, .sampler = &sampler});
      for (const Table& batch : batches) sums.add(batch);
    };
  }
  const DataLoaderOptions one_worker{.batch_size = 1, .sampler = &sampler, .num_workers = 1};
  if (operation == "loader") {
    return [&data, &sampler, one_worker](Sums& sums) {
      DataLoader loader(data, one_worker, RowGroupCollate({.batch_size = kBatchSize, .sampler = &sampler}));
      for (const auto& batches : loader) {
        for (const Table& batch : batches) sums.add(batch);
      }
    };
  }
  TORCH_CHECK_VALUE(operation == "row_groups", "there is no operation '", operation, "'");
  return [&data, one_worker](Sums& sums) {
    DataLoader loader(data, one_worker);
    for (const Table& batch : loader) sums.add(batch);
  };
}

lockstep::bench::Timings measure(const lockstep::bench::Command& command) {
  const ParquetDataset data(command.argument);
  RowGroupSampler sampler(data,
                          {.num_replicas = 1, .rank = 0, .shuffle_rows = command.operation != "row_groups"});
  const auto epoch = epoch_of(command.operation, data, sampler);
  lockstep::bench::Timings timings;
  Sums sums;
  for (int64_t i = -command.warmup; i < command.iterations; ++i) {
    sampler.set_epoch(i);
    sums = {};
    const int64_t cpu = lockstep::bench::cpu_clock();
    const int64_t begin = lockstep::bench::wall_clock();
    epoch(sums);
    if (i < 0) continue;
    timings.wall.push_back(lockstep::bench::wall_clock() - begin);
    timings.cpu.push_back(lockstep::bench::cpu_clock() - cpu);
  }
  TORCH_CHECK(sums.rows == static_cast<double>(data.num_rows()), "an epoch had ", sums.rows, " of ",
              data.num_rows(), " rows");
  timings.facts = {{"rows", sums.rows}, {"sum", sums.sum}};
  return timings;
}

}  // namespace

int main(int argc, char** argv) try {
  at::set_num_threads(1);
  return lockstep::bench::serve(argc, argv, 0, measure);
} catch (const c10::Error& error) {
  std::cerr << "bench_parquet_loading: " << error.what_without_backtrace() << std::endl;
  return 1;
}
