#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/backend/memory_source.h>
#include <lockstep/collectives/process_group.h>

namespace lockstep {

namespace transport {
class Arena;
}

/// A flat tensor of zeros in memory that the group's ranks share, where the group has such for CPU tensors;
/// on another device in that device's memory.
at::Tensor shared_zeros(const ProcessGroup& group, int64_t numel, const at::TensorOptions& options);

/// Where shared_zeros() takes CPU tensors from; null for groups that have no arena.
std::shared_ptr<transport::Arena> arena_of(const ProcessGroup& group);

/// The flat memory of one bucket, cut into *slots*, one for each of its gradients.
///
/// A slot is lent to one tensor at a time, which may outlive everything else; until it is gone, the slot is
/// *taken*. So a gradient that the user keeps is never written over: the reducer moves the bucket to other
/// memory, and abandons this one. Thread-safe.
class BucketMemory final : public MemoryOwner, public std::enable_shared_from_this<BucketMemory> {
 public:
  /// `offsets`: where each slot begins, in bytes, ascending. `arena`: that the buffer lies in, or null.
  BucketMemory(at::Tensor buffer, std::vector<size_t> offsets, std::shared_ptr<transport::Arena> arena);

  const at::Tensor& buffer() const { return buffer_; }
  void* address(size_t slot) const { return base_ + offsets_[slot]; }
  bool taken(size_t slot) const;
  bool any_taken() const;
  /// The slot's memory, taken from now on; nothing if it is already.
  MemoryBlock take(size_t slot);
  void deallocate(void* memory) override;
  /// The reducer has no further use for it: while less than half of it is taken, pages of slots that are not
  /// go back to the system, now and as slots become free, so that a small tensor does not hold the memory of
  /// all. Pages stay while another tensor shows the whole memory, as bucket views do and what a communication
  /// hook has kept. When no slot is taken they stay, too, for the memory as a whole is about to be used
  /// again. To be called once at most.
  void abandon();

 private:
  /// In the order in which they follow each other.
  enum class Phase : uint8_t {
    kInUse,       // by the reducer
    kAbandoned,   // all pages have stayed so far
    kGivingBack,  // pages of all free slots have been given back
  };

  /// The one place where the phase changes, which never goes back. Under the mutex.
  void enter(Phase next);
  size_t end_of(size_t slot) const;
  void give_back_pages(size_t freed);
  size_t give_back_run(size_t first);

  const at::Tensor buffer_;
  std::byte* const base_;
  const std::vector<size_t> offsets_;
  const std::shared_ptr<transport::Arena> arena_;
  mutable std::mutex mutex_;
  std::vector<bool> taken_;
  size_t taken_bytes_ = 0;
  Phase phase_ = Phase::kInUse;
};

}  // namespace lockstep
