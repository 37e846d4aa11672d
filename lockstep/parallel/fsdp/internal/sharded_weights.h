#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/nn/named_tensor.h>
#include <lockstep/parallel/fsdp/internal/row_memory.h>
#include <lockstep/parallel/fsdp/internal/shard_layout.h>
#include <lockstep/parallel/fsdp/internal/weight_memory.h>
#include <lockstep/parallel/fsdp/sharded_tensor.h>

namespace lockstep::fsdp::internal {

/// The dtypes of a weight.
struct WeightDtypes {
  at::ScalarType own;      // which the optimizer sees
  at::ScalarType seen;     // by modules
  at::ScalarType reduced;  // of gradients on their way
};

/// A parameter of the module, whose values lie once for all ranks, and what this rank owns of it.
struct ShardedWeight {
  std::string name;
  at::Tensor parameter;  // the module's; its values are in the view
  WeightDtypes dtypes;
  std::vector<int64_t> sizes;
  RowShape shape;
  Rows own;
  bool trains;  // required gradients when it was wrapped
  /// This rank's rows, a leaf for the optimizer. They are the weight's own memory, or with mixed precision a copy of their
  /// own, from which publish() makes those that modules see. It lies in `readable`, which nothing can write to, but in
  /// write(), where it lies in `writable`.
  at::Tensor shard;
  at::Tensor readable, writable;
  at::Tensor published = {};  // these rows, in the writable memory; undefined where the shard is there itself
};

/// Whether these are values of lower precision that mixed precision has made of a weight's own, whose wrapper is gone perhaps.
bool is_lower_precision_view(const at::Tensor& tensor);

/// As tensor.set_data(data), also where that lies on another kind of device: the tensor stays the one that the module and the
/// class's members have.
void replace_data(const at::Tensor& tensor, const at::Tensor& data);

/// The weights of a model: their memory, and the shards. They lie once for all ranks of a host; a subclass may have them
/// elsewhere. Collective are those that say so. Used by one thread at a time.
class ShardedWeights {
 public:
  /// Makes place for `parameters` (each once; with their dtypes), with `offload` in files in this directory. Collective.
  ShardedWeights(const std::vector<NamedTensor>& parameters, const std::vector<WeightDtypes>& dtypes,
                 std::shared_ptr<const ShardGroups> groups,
                 const std::optional<std::filesystem::path>& offload = {});
  virtual ~ShardedWeights() = default;
  /// The memory of what write() changes where that is not what modules see. Before move_value().
  void allocate_copies();
  /// Moves a parameter's values there: each rank the rows that it owns, of its own values or of rank 0's, on which alone
  /// the parameter needs values then. What it had before is free. Each once; the barrier() of group() follows the last
  /// one. Collective.
  void move_value(size_t index, bool of_rank_0);
  /// The same, with nothing sent, of a parameter whose rows of this rank other weights have.
  void take_rows(size_t index, const at::Tensor& own_rows);

  const ShardGroups& groups() const { return *groups_; }
  /// The ranks that share the memory, or have the rows among them.
  const ProcessGroup& group() const { return groups().host(); }
  /// Where modules compute.
  c10::Device device() const { return device_; }
  /// Where the shards lie: there, or in files of the host.
  c10::Device rows_device() const { return offload_ ? c10::Device(at::kCPU) : device_; }
  const std::vector<ShardedWeight>& all() const { return weights_; }
  const ShardedWeight* find(const std::string& name) const;

  /// Throws c10::Error that names the parameter when the module's are not where they were put, by module.to(), say, or require
  /// gradients now.
  virtual void check_in_place() const;

  /// Runs `change`, in which the shards can be written. Then it brings their values to where modules see them, where that is
  /// not the same place, and tells autograd that all weights have changed. While no rank reads.
  void write(const std::function<void()>& change);

  // Within write():
  /// This rank's rows of a whole value.
  void set_value(size_t index, const at::Tensor& value);
  /// Gives the module's parameters whole values of their own, which can be written, in memory of empty_whole() of each, …
  void give_private_values(const std::vector<at::Tensor>& memory);
  /// … throws c10::ValueError if they have other sizes now, …
  void check_private_values() const;
  /// … makes this rank's rows of them the weights', …
  void write_private_values_back();
  /// … and takes them away again.
  void take_private_values();

  // Operations of all ranks allocate nothing large: a rank without memory would leave the others waiting in the next one.

  /// Memory for the whole value, in the shards' dtype or another one, on the CPU or device().
  at::Tensor empty_whole(size_t index, std::optional<at::ScalarType> dtype = {},
                         c10::Device device = at::kCPU) const;
  /// Copies the whole value into `whole`, of empty_whole(), or nowhere when it is undefined. Collective over group() where
  /// the shards are no part of shared weights (copies_by_gathering()). Not while weights are written.
  virtual void copy(size_t index, const at::Tensor& whole) const;
  virtual bool copies_by_gathering() const { return copies_ != nullptr; }
  /// The whole of what has a row for each row of the weight, from the ranks' parts, such as state of the optimizer. Collective
  /// over group().
  void gather(size_t index, const at::Tensor& part, const at::Tensor& whole) const;
  /// This rank's part of such a whole; a view.
  at::Tensor part_of(size_t index, const at::Tensor& whole) const;
  /// The same from parts that other ranks had of it, perhaps of another number of them; a copy. Throws c10::ValueError when
  /// they are of something else, or some of this rank's rows are in none.
  at::Tensor own_rows(size_t index, const std::vector<ShardedTensor>& parts) const;

 protected:
  /// Where this rank's rows of a weight lie, as modules see them.
  struct OwnRows {
    std::byte* writable;
    std::byte* readable;
    std::shared_ptr<void> owner;  // of the memory
  };

  /// For a subclass that has memory of its own.
  ShardedWeights(std::shared_ptr<const ShardGroups> groups, const std::vector<NamedTensor>& parameters,
                 const std::vector<WeightDtypes>& dtypes, c10::Device device,
                 const std::optional<std::filesystem::path>& offload);

  const std::optional<std::filesystem::path>& offload() const { return offload_; }
  virtual OwnRows own_rows_place(size_t index) const;
  /// What the module's parameter is.
  virtual at::Tensor in_view(size_t index) const;
  void check_frozen() const;
  std::string part_name(size_t index) const;

 private:
  void make_shard(size_t index);
  void put_in_place(size_t index);
  void take_rows_of_rank_0(size_t index);
  void take_own_rows(size_t index);
  at::Tensor scratch(int64_t begin, int64_t numel, at::ScalarType dtype) const;
  void put_shards(at::Tensor ShardedWeight::*place);

  const std::shared_ptr<const ShardGroups> groups_;
  const c10::Device device_;
  const std::optional<std::filesystem::path> offload_;
  std::shared_ptr<WeightMemory> memory_;
  std::vector<int64_t> offsets_;  // in the memory, by weight
  std::shared_ptr<RowMemory> copies_;
  std::vector<int64_t> copy_offsets_;  // there, by weight; only of those with another dtype there is anything
  at::Tensor scratch_;                 // for what travels between ranks
  std::vector<ShardedWeight> weights_;
};

}  // namespace lockstep::fsdp::internal
