#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/nn/named_tensor.h>

namespace lockstep {

/// Lower precision for forward, backward and reduction, while the parameters that the optimizer sees stay as
/// they are. Only floating-point tensors are cast. torch/nn/parallel/distributed.py, _MixedPrecision.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = {};   ///< parameters and forward's inputs
  std::optional<at::ScalarType> reduce_dtype = {};  ///< gradients on their way; param_dtype if not given
  std::optional<at::ScalarType> buffer_dtype = {};  ///< buffers, for good
};

/// torch.nn.parallel.DistributedDataParallel's arguments, with its names and defaults.
struct DistributedDataParallelOptions {
  ProcessGroup process_group = {};  ///< empty: the default group
  /// The one device that the module is on, to which forward's inputs are moved then. Must be empty for
  /// modules on the CPU and on several devices; so must `output_device`, which is that device, too.
  std::vector<at::Device> device_ids = {};
  std::optional<at::Device> output_device = {};
  /// Rank 0's buffers to all before each synchronised forward; true unless told.
  std::optional<bool> forward_sync_buffers = {};
  /// The older name: false leaves the buffers out at construction, too. Deprecated, as in torch 2.13.
  std::optional<bool> broadcast_buffers = {};
  bool init_sync = true;  ///< verify the model and broadcast rank 0's state at construction
  /// MiB of gradients in a bucket; chosen from the first iterations' measurements if not given.
  std::optional<double> bucket_cap_mb = {};
  /// MiB of each bucket, in the order of reduction; the last one's counts for all that follow.
  std::vector<double> bucket_cap_mb_list = {};
  /// MiB in the bucket that is reduced first, so that communication starts early; 1 unless bucket_cap_mb is
  /// given, whose value it has then. (In torch: dist._DEFAULT_FIRST_BUCKET_BYTES.)
  std::optional<double> first_bucket_cap_mb = {};
  /// Finds the parameters that a forward did not use by walking the graph from its outputs, so that the
  /// others' reduction does not wait for their gradients.
  bool find_unused_parameters = false;
  /// Whether gradients share the buckets' storage, as in torch. They lie there in both cases; false: what the
  /// user keeps of a gradient is never overwritten.
  bool gradient_as_bucket_view = false;
  /// The graph is the same in every iteration: what the first one shows about unused parameters and about
  /// parameters used in several nested passes holds for all.
  bool static_graph = false;
  /// Buckets in which no parameter was used are not reduced. All ranks must use the same ones, so that it
  /// can't be used inside a Join.
  bool skip_all_reduce_unused_params = false;
  std::optional<MixedPrecision> mixed_precision = {};
  /// Names of parameters and buffers to leave alone. (In torch: the module's
  /// _ddp_params_and_buffers_to_ignore.)
  std::vector<std::string> parameters_to_ignore = {};
  /// Parameters that are reduced together, in one operation that starts when the gradient of
  /// param_to_hook_all_reduce is computed; otherwise they are ignored. Both or neither.
  std::vector<NamedTensor> delay_all_reduce_named_params = {};
  at::Tensor param_to_hook_all_reduce = {};
  /// When a synchronised step fails, buffers are put back as they were before its first forward, as the
  /// random number generator always is. Costs a copy of the buffers per step.
  bool restore_buffers_on_failure = false;
  /// How gradients travel between hosts, on all ranks the same; the group's own if not given. With kInt8 what the
  /// rounding lost of a step's gradients is added to the next one's. No effect on one host, and none on what a
  /// communication hook reduces, which travels as its group has it.
  std::optional<HostCompression> between_hosts = {};
};

}  // namespace lockstep
