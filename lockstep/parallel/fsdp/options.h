#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/collectives/host_compression.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/fsdp/param_init.h>
#include <lockstep/parallel/fsdp/wrap_policy.h>

namespace lockstep {
namespace fsdp {

/// What lies where, under torch's names. On the CPUs of one host each weight lies once in shared memory, whatever is
/// chosen, so the first, the second and the last come to the same. Over several hosts HYBRID_SHARD is that on each host;
/// with the other two, and on devices, a rank has its rows alone, and parameters are gathered for forward and backward:
/// with FULL_SHARD they are freed after each, with SHARD_GRAD_OP after backward. HYBRID_SHARD on devices is FULL_SHARD
/// over each host's ranks.
enum class ShardingStrategy { FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD };

/// When the next group of gathered parameters is gathered in backward: before the current one's gradients are computed,
/// or after, which takes less memory and overlaps less. torch/distributed/fsdp/api.py.
enum class BackwardPrefetch { BACKWARD_PRE, BACKWARD_POST };

/// Lower precision for forward, backward and reduction, while the shards that the optimizer sees stay as they are. Only
/// floating-point tensors are cast; with an auto_wrap_policy those of BatchNorms stay as they are, in groups of their own.
/// torch/distributed/fsdp/api.py.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype =
      {};  ///< of the weights that modules see, and of forward's inputs
  std::optional<at::ScalarType> reduce_dtype = {};  ///< of gradients on their way; param_dtype if not given
  std::optional<at::ScalarType> buffer_dtype = {};  ///< of buffers, for good
  bool keep_low_precision_grads = false;            ///< shards' gradients stay in the dtype of the reduction
  bool cast_forward_inputs = false;                 ///< forward's inputs to param_dtype, and …
  bool cast_root_forward_inputs = true;             ///< … of a wrapper that is no part of another one

  bool is_used() const { return param_dtype || reduce_dtype || buffer_dtype; }
};

/// Where what outlives a step lies: the weights, the rows in full precision, and the optimizer's state. With
/// offload_params in files that all processes map, so that the kernel writes to the disk what memory has no room for;
/// gradients stay in memory. Of a model on a device the optimizer steps on the CPU then. torch/distributed/fsdp/api.py.
struct CPUOffload {
  bool offload_params = false;
  /// On a disk of this host; where temporary files go ($TMPDIR, or /tmp) if it is empty. The files have no names there, and go
  /// with the processes.
  std::filesystem::path directory = {};
};

}  // namespace fsdp

/// torch.distributed.fsdp.FullyShardedDataParallel's arguments, with its names and defaults.
struct FullyShardedDataParallelOptions {
  ProcessGroup process_group =
      {};  ///< empty: the default group; for HYBRID_SHARD over several hosts with equally many ranks on each
  /// NO_SHARD is refused: it is DistributedDataParallel.
  fsdp::ShardingStrategy sharding_strategy = fsdp::ShardingStrategy::FULL_SHARD;
  /// Which modules' gradients are reduced together, and parameters gathered; without one all are.
  fsdp::AutoWrapPolicy auto_wrap_policy = {};
  fsdp::MixedPrecision mixed_precision = {};
  /// With all within them, left as they are: each rank has its own, and their gradients are its own.
  std::vector<std::shared_ptr<torch::nn::Module>> ignored_modules = {};
  std::vector<at::Tensor> ignored_parameters = {};  ///< likewise
  /// Sets values of modules with tensors on the meta device, on rank 0 alone, for all; without one, fsdp::reset_parameters().
  /// When it throws, the module can't be used any more.
  fsdp::ParamInitFn param_init_fn = {};
  /// Where the module computes. What it has elsewhere is moved there, one parameter after the other, and forward's inputs are.
  /// Otherwise it is where the parameters are. On a device they are gathered.
  std::optional<c10::Device> device_id = {};
  /// Rank 0's parameters and buffers for all; other ranks may have theirs on the meta device. Otherwise each rank gives the rows
  /// that it owns of its own values, which should be the same everywhere.
  bool sync_module_states = false;
  fsdp::CPUOffload cpu_offload = {};
  /// In how many buffers of each rank gradients wait for their reduction.
  int gradient_buffers = 3;
  /// A buffer is as large as the largest group's gradients, and at most so large, in MiB; larger groups are reduced in parts.
  /// Backward goes on while at most gradient_buffers of them are reduced.
  double gradient_buffer_cap_mb = 8;
  /// How gradients travel between hosts with HYBRID_SHARD, on all ranks the same: as for DistributedDataParallel.
  std::optional<HostCompression> between_hosts = {};

  /// FULL_SHARD and SHARD_GRAD_OP gather on one host's CPUs, too, as they do over several hosts and on devices.
  bool gather = false;
  // Where parameters are gathered:
  /// Early, in the order of the step before; none: when they are used.
  std::optional<fsdp::BackwardPrefetch> backward_prefetch = fsdp::BackwardPrefetch::BACKWARD_PRE;
  bool forward_prefetch = false;  ///< early in forward, too
  /// At most two groups are whole or on their way at once, otherwise three. (SHARD_GRAD_OP keeps all, until backward.)
  bool limit_all_gathers = true;
};

}  // namespace lockstep
