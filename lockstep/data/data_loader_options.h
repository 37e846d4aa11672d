#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include <lockstep/data/samplers/sampler.h>

namespace lockstep::data {

/// The options of torch.utils.data.DataLoader, with its names and defaults.
struct DataLoaderOptions {
  /// Samples per batch of this process, not of the whole job (see rank_share()).
  int64_t batch_size = 1;
  /// The order of each epoch; not owned, must outlive the loader. None: the data set's order, or shuffle's.
  Sampler* sampler = nullptr;
  /// The batches of each epoch, in place of batch_size, sampler, shuffle and drop_last; not owned, must
  /// outlive the loader.
  SamplerOfBatches* batch_sampler = nullptr;
  /// A new random order in each epoch; not together with a sampler.
  bool shuffle = false;
  /// Background threads that make batches ahead of the caller. 0: batches are made when they are asked for,
  /// in the calling thread.
  int num_workers = 0;
  /// Leave out the last batch when it is smaller than batch_size.
  bool drop_last = false;
  /// How many batches each worker may have ready or in the making before they are asked for.
  int prefetch_factor = 2;
  /// Keep the worker threads, idle, from one epoch to the next. Then a begin() ends an epoch under way.
  bool persistent_workers = false;
  /// Hand out batches in page-locked memory (at::Tensor::pin_memory), from which copies to a GPU can run
  /// beside the training: batch.data.to(device, /*non_blocking=*/true), or a DeviceLoader. Where there is no
  /// accelerator (for CUDA: before set_device()): a warning, once, and plain memory.
  bool pin_memory = false;
  /// With workers: how long to wait for a batch before it is an error that names the batch. 0: for ever.
  std::chrono::milliseconds timeout{0};
  /// Called in each worker thread before its first batch, with the worker's id; get_worker_info() tells more.
  std::function<void(int worker_id)> worker_init_fn = {};
  /// Seed of the generator of shuffle and of the workers' seeds, as Python's
  /// generator=torch.Generator().manual_seed(seed). None: each epoch draws from torch's default CPU
  /// generator, so torch::manual_seed() decides.
  std::optional<int64_t> seed = std::nullopt;
};

}  // namespace lockstep::data
