#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/memory_source.h>
#include <lockstep/collectives/process_group.h>

namespace lockstep {

/// A flat tensor of zeros in memory that the group's ranks share, where the group has such for CPU tensors;
/// on another device in that device's memory.
at::Tensor shared_zeros(const ProcessGroup& group, int64_t numel, const at::TensorOptions& options);

/// The flat memory of one bucket, cut into *slots*, one for each of its gradients.
///
/// A slot is lent to one tensor at a time, which may outlive everything else; until it is gone, the slot is
/// *taken*. So a gradient that the user keeps is never written over: the reducer moves the bucket to other
/// memory. Thread-safe.
class BucketMemory final : public MemoryOwner, public std::enable_shared_from_this<BucketMemory> {
 public:
  /// `offsets`: where each slot begins, in bytes, ascending.
  BucketMemory(at::Tensor buffer, std::vector<size_t> offsets);

  const at::Tensor& buffer() const { return buffer_; }
  void* address(size_t slot) const { return base_ + offsets_[slot]; }
  bool taken(size_t slot) const;
  bool any_taken() const;
  /// The slot's memory, taken from now on; nothing if it is already.
  MemoryBlock take(size_t slot);
  void deallocate(void* memory) override;

 private:
  const at::Tensor buffer_;
  std::byte* const base_;
  const std::vector<size_t> offsets_;
  mutable std::mutex mutex_;
  std::vector<bool> taken_;
};

}  // namespace lockstep
