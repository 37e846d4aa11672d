#pragma once

#include <cstddef>
#include <memory>

namespace lockstep {

/// Takes back the memory of a MemoryBlock. Thread-safe; must not throw.
class MemoryOwner {
 public:
  virtual ~MemoryOwner() = default;
  virtual void deallocate(void* memory) = 0;
};

/// Memory and its owner, which takes it back; empty: the source has none.
struct MemoryBlock {
  void* memory = nullptr;
  std::shared_ptr<MemoryOwner> owner = {};
};

/// Where new CPU tensors' memory may come from. Called by the thread whose source it is, and by no other.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  /// Memory of `bytes` (more than 0), or none: the usual allocator then gives it, and allocated_elsewhere()
  /// is told. Must not make tensors.
  virtual MemoryBlock allocate(size_t bytes) = 0;
  virtual void allocated_elsewhere(const void* /*memory*/, size_t /*bytes*/) {}
};

/// Makes `source` (null: none) where this thread's new CPU tensors come from, and returns the one before.
/// Other threads are not touched. The first call puts an allocator in front of c10's CPU allocator, for good
/// (c10/core/CPUAllocator.h); where another library has placed one of a higher priority there, no source is
/// ever asked. Tensors may outlive the source.
std::shared_ptr<MemorySource> exchange_memory_source(std::shared_ptr<MemorySource> source);

/// Registers a block that a tensor is made of by hand (at::from_blob): give_back(block.memory) is its
/// deleter's call.
void lend(const MemoryBlock& block);
void give_back(void* memory);

}  // namespace lockstep
