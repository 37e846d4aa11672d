#pragma once

#include <cstddef>
#include <memory>

#include <lockstep/transport/shared_memory/arena.h>

namespace lockstep {

/// While it lives, this thread's new CPU tensors lie in an arena, where collectives need not copy them: also
/// those that code which knows nothing of Lockstep makes, such as the gradient buckets of torch's Reducer.
///
/// What does not fit into the machine's shared memory comes from the usual allocator. The tensors may outlive
/// this object and the group. One at a time in a thread; other threads are not touched. The first one puts an
/// allocator in front of c10's CPU allocator, for good (c10/core/CPUAllocator.h); where another library has
/// placed one of a higher priority there, nothing comes from the arena: see bytes().
class ArenaAllocation {
 public:
  explicit ArenaAllocation(std::shared_ptr<transport::Arena> arena);
  ArenaAllocation(const ArenaAllocation&) = delete;
  ArenaAllocation& operator=(const ArenaAllocation&) = delete;
  ~ArenaAllocation();

  /// What this thread has got from the arena since.
  size_t bytes() const { return bytes_; }

 private:
  friend class ArenaAllocator;
  std::shared_ptr<transport::Arena> arena_;
  size_t bytes_ = 0;
};

}  // namespace lockstep
