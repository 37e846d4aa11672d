#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/parquet/parquet_batches.h>

/// What bench_data measures of Parquet files; benchmarks/peers/parquet_file.py makes the file, and does the
/// same with pyarrow.
namespace lockstep::benchmarks {

/// The file that parquet_file.write() made.
inline constexpr const char* kParquetFile = "LOCKSTEP_BENCH_PARQUET_FILE";

/// A function that loads one epoch, row groups and the rows in them in a random order, in batches of 256 rows
/// with all columns, read ahead in one thread; it answers with the sum of the labels (that of row i is i).
inline std::function<int64_t()> parquet_epochs() {
  const auto path = environment::text(kParquetFile);
  TORCH_CHECK(path, kParquetFile, " should name the file that benchmarks/peers/parquet_file.py writes");
  const data::ParquetDataset dataset(*path);
  auto sampler = std::make_shared<data::RowGroupSampler>(
      dataset, data::RowGroupSamplerOptions{.num_replicas = 1, .rank = 0, .shuffle_rows = true});
  auto batches = std::make_shared<data::ParquetBatches>(
      dataset, data::ParquetBatchesOptions{.batch_size = 256, .sampler = sampler.get()});
  return [sampler, batches, epoch = int64_t{0}]() mutable {
    sampler->set_epoch(epoch++);
    int64_t sum = 0;
    for (const data::Table& batch : *batches) {
      const at::Tensor& label = batch.tensor("label");
      const auto* labels = label.const_data_ptr<int64_t>();
      for (int64_t i = 0; i < label.size(0); ++i) sum += labels[i];
      TORCH_CHECK(batch.tensor("x0").const_data_ptr<float>()[0] < 1 && batch["words"].values.size(0) > 0,
                  "no such row was written");
    }
    return sum;
  };
}

}  // namespace lockstep::benchmarks
