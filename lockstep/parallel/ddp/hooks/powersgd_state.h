#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/ivalue.h>

#include <lockstep/collectives/process_group.h>

namespace lockstep {

/// PowerSGDState's arguments, by name and in the order of Python's.
struct PowerSGDOptions {
  /// The rank r of the approximation: an n×m gradient travels as (n + m)·r numbers. Typically 1 to 4; must be
  /// at least 1.
  int64_t matrix_approximation_rank = 1;
  /// So many iterations are averaged as they are, for early gradients matter most. At least 2 with error
  /// feedback or warm start, for the buckets change after the first iteration.
  int64_t start_powerSGD_iter = 1'000;
  /// A gradient is compressed if (n + m)·r·min_compression_rate < n·m.
  double min_compression_rate = 2;
  /// Add what compression lost to the next iteration's gradients. Costs memory of twice the gradients' size
  /// (PyTorch: once, and twice during a step).
  bool use_error_feedback = true;
  /// Begin with the last iteration's Q instead of a random one.
  bool warm_start = true;
  /// Added to the lengths of columns, such as 1e-8, where gradients may be zero as a whole: without it they
  /// become NaN.
  double orthogonalization_epsilon = 0;
  /// The seed of the random Qs, which are PyTorch's for the same seed. 0 to 2^32 − 1, the same on all ranks.
  int64_t random_seed = 0;
  /// Statistics are logged (level info) every so many iterations.
  int64_t compression_stats_logging_frequency = 10'000;
  /// Compress gradients of one shape in one batched product; takes a copy of them.
  bool batch_tensors_with_same_shape = false;
};

/// What PowerSGDState.compression_stats() answers.
struct CompressionStats {
  double compress_rate;  ///< before / after; 0 while nothing was compressed
  int64_t numel_before_compression;
  int64_t numel_after_compression;
};

/// The settings and the memory of powerSGD_hook and batched_powerSGD_hook, for one model.
///
/// A handle: copies share what it refers to, as names in Python do. Read it between iterations, from any
/// thread. Each rank has its own, made with the same options.
/// torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py.
class PowerSGDState {
 public:
  /// `process_group`: empty means the default group. Throws c10::ValueError for options that make no sense.
  explicit PowerSGDState(ProcessGroup process_group = {}, const PowerSGDOptions& options = {});

  PowerSGDOptions options() const;
  ProcessGroup process_group() const;
  void set_process_group(ProcessGroup process_group);
  /// Iterations so far.
  int64_t iter() const;
  /// Since compression began.
  CompressionStats compression_stats() const;

  /// Everything but the process group, under the names of Python's __getstate__(), in one dictionary:
  /// torch::pickle_save(state.get_state()). Each rank saves its own, for the errors differ. The generator is
  /// a tensor (625 int64: the key and the position of numpy's RandomState).
  c10::IValue get_state() const;
  /// Takes over what get_state() gave; the process group stays. What does not fit the buckets that come (they
  /// change after a program's first iteration) is dropped then. Throws c10::Error for a dictionary that is no
  /// such state.
  void set_state(const c10::IValue& state);

  struct Data;  // the hooks'
  const std::shared_ptr<Data>& data() const { return data_; }

 private:
  std::shared_ptr<Data> data_;
};

}  // namespace lockstep
