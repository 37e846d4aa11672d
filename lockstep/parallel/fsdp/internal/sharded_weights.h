#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/nn/named_tensor.h>
#include <lockstep/parallel/fsdp/internal/shard_layout.h>
#include <lockstep/parallel/fsdp/internal/weight_memory.h>
#include <lockstep/parallel/fsdp/options.h>

namespace lockstep::fsdp::internal {

/// A parameter of the module, whose values lie once for all ranks, and what this rank owns of it.
struct ShardedWeight {
  std::string name;
  at::Tensor parameter;  // the module's; its values are in the view
  RowShape shape;
  Rows own;
  /// This rank's rows, a leaf for the optimizer. They are the weight's own memory, or with mixed precision a copy of their
  /// own, from which publish() makes those that modules see.
  at::Tensor shard;
  at::Tensor published = {};  // these rows, in the writable memory; undefined where the shard is there itself
};

/// The weights of a model: their memory, and the shards. Collective are those that say so. Used by one thread at a time.
class ShardedWeights {
 public:
  /// Moves the values of `parameters` (each once, on the CPU) into shared memory, one after the other, so that beside it
  /// there is never more than what the module had. Collective.
  ShardedWeights(const std::vector<NamedTensor>& parameters, const ProcessGroup& parent,
                 const FullyShardedDataParallelOptions& options);

  const ProcessGroup& group() const { return memory_->group(); }
  const std::vector<ShardedWeight>& all() const { return weights_; }
  const ShardedWeight* find(const std::string& name) const;

  /// Throws c10::Error that names the parameter when the module's are not where they were put: by module.to(), say.
  void check_in_place() const;

  // While weights are written:
  /// Brings the shards' values to where modules see them, where that is not the same place, and tells autograd that all
  /// weights have changed.
  void publish();
  /// This rank's rows of a whole value.
  void set_value(size_t index, const at::Tensor& value);
  /// Gives the module's parameters whole values of their own, which can be written, …
  void give_private_values();
  /// … and takes them away again; this rank's rows of them become the weights' if `writeback`.
  void take_private_values(bool writeback);

  /// A copy of the whole value, in the shards' dtype; undefined unless it is `wanted` here. Collective where the shards are
  /// no part of the shared weights (mixed precision). Not while weights are written.
  at::Tensor copy(size_t index, bool wanted) const;
  /// The whole of what has a row for each row of the weight, from the ranks' parts: state of the optimizer. Collective.
  at::Tensor gather(size_t index, const at::Tensor& part) const;
  /// This rank's part of such a whole; a view.
  at::Tensor part_of(size_t index, const at::Tensor& whole) const;

 private:
  at::Tensor in_view(size_t index) const;

  std::shared_ptr<WeightMemory> memory_;
  std::vector<int64_t> offsets_;  // in the memory, by weight
  std::vector<ShardedWeight> weights_;
};

}  // namespace lockstep::fsdp::internal
