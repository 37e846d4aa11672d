#pragma once

#include <cstdint>

#include <ATen/core/Generator.h>

namespace lockstep::data {

/// A loading thread of a DataLoader, as torch.utils.data.get_worker_info() tells.
struct WorkerInfo {
  int id = 0;           ///< 0 to num_workers - 1
  int num_workers = 1;  ///< of this loader
  int64_t seed = 0;     ///< the epoch's base seed + id
  /// A CPU generator of this worker, seeded with `seed` at the start of each epoch. Worker w makes batches w,
  /// w + num_workers, …, so what is drawn from it is the same in each run with as many workers. For what
  /// shall not depend on their number there is sample_generator().
  at::Generator generator = {};
};

/// The worker that the calling thread is; null in any other thread, and with num_workers = 0. Valid until the
/// function that the loader has called returns.
const WorkerInfo* get_worker_info();

// Randomness of a sample (a crop, a flip, noise). Torch's default generator is one for all threads, so what
// several workers draw from it differs from run to run. The two functions below give each sample a seed of
// its own, made of the epoch's base seed, the sample's position in the epoch, and its index: the same in each
// run, for any number of workers, and after a resume; different for each epoch and sample.

/// The seed of the sample that a DataLoader is loading in the calling thread: inside of get(), that one;
/// inside of get_batch() and of a collate function, the one at place `i` of the batch. In any other place a
/// number drawn from torch's default generator. Throws c10::IndexError when the batch has no place `i`.
uint64_t sample_seed(int64_t i = 0);

/// A CPU generator seeded with sample_seed(i):
///
///     const double shift = at::rand({}, sample_generator()).item<double>();
at::Generator sample_generator(int64_t i = 0);

}  // namespace lockstep::data
