#pragma once

#include <cstddef>
#include <memory>

#include <lockstep/collectives/backend/memory_source.h>
#include <lockstep/transport/host/memory/arena.h>

namespace lockstep {

/// While it lives, this thread's new CPU tensors lie in an arena, where collectives need not copy them: also
/// those that code which knows nothing of Lockstep makes, such as the gradient buckets of torch's Reducer.
///
/// What does not fit into the machine's shared memory comes from the usual allocator. The tensors may outlive
/// this object and the group. The innermost one of a thread counts; ended in reverse order, by the same
/// thread. See exchange_memory_source() for what it needs; where that does not work, bytes() stays 0.
class ArenaAllocation {
 public:
  explicit ArenaAllocation(std::shared_ptr<transport::Arena> arena);
  ArenaAllocation(const ArenaAllocation&) = delete;
  ArenaAllocation& operator=(const ArenaAllocation&) = delete;
  ~ArenaAllocation();

  /// What this thread has got from the arena since.
  size_t bytes() const;

 private:
  class Source;
  std::shared_ptr<Source> source_;
  std::shared_ptr<MemorySource> before_;
};

}  // namespace lockstep
