#pragma once

#include <map>
#include <mutex>

#include <ATen/core/Tensor.h>

#include <lockstep/parallel/ddp/grad_bucket.h>
#include <lockstep/parallel/ddp/hooks/bucket_order.h>
#include <lockstep/parallel/ddp/hooks/internal/numpy_random.h>
#include <lockstep/parallel/ddp/hooks/powersgd_state.h>

namespace lockstep {

struct PowerSGDState::Data {
  /// What is kept of a bucket between iterations. Used by one callback or hook at a time.
  struct Memory {
    at::Tensor error;  // what the last compression lost; undefined before the first
    at::Tensor
        spare;        // of the error's size: takes the next error, so that a failed iteration changes nothing
    at::Tensor p, q;  // of all matrices, one after the other; undefined unless warm
  };

  Data(ProcessGroup group, const PowerSGDOptions& its_options)
      : process_group(std::move(group)), options(its_options), random(its_options.random_seed) {}

  mutable std::mutex mutex;  // of all but `order`, which is the hooks', and a Memory's content
  ProcessGroup process_group;
  PowerSGDOptions options;
  hooks::internal::NumpyRandomState random;
  std::map<size_t, Memory> memories;  // by the bucket's index
  int64_t iter = 0;
  int64_t total_numel_before_compression = 0;
  int64_t total_numel_after_compression = 0;
  int64_t next_stats_report = 0;
  BucketOrder order;

  Memory& memory_of(const GradBucket& bucket) {
    std::lock_guard lock(mutex);
    return memories[bucket.index()];
  }
  /// After a bucket is reduced.
  void maybe_increase_iter(bool is_last);
  /// Before a bucket is compressed: counts its elements, and reports now and then.
  void count(int64_t numel_before, int64_t numel_after, bool is_last);
};

}  // namespace lockstep
