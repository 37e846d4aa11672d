#include <mutex>
#include <unordered_map>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <lockstep/base/log.h>
#include <lockstep/base/per_process.h>
#include <lockstep/collectives/arena_allocator.h>
#include <lockstep/transport/shared_memory/forked_memory.h>

namespace lockstep {
namespace {

thread_local ArenaAllocation* current = nullptr;

/// Blocks of arenas that are in use. c10 frees raw memory (raw_deallocate) by its address alone.
class Blocks {
 public:
  void add(void* memory, std::shared_ptr<transport::Arena> arena) {
    std::lock_guard lock(mutex_);
    arenas_.emplace(memory, std::move(arena));
  }
  /// False if the memory is no arena's.
  bool free(void* memory) {
    std::shared_ptr<transport::Arena> arena;
    {
      std::lock_guard lock(mutex_);
      const auto found = arenas_.find(memory);
      if (found == arenas_.end()) return false;
      arena = std::move(found->second);
      arenas_.erase(found);
    }
    arena->deallocate(memory);
    return true;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, std::shared_ptr<transport::Arena>> arenas_;
};

Blocks& blocks() {
  static PerProcess<Blocks> all;
  return all.get();
}

/// Of DataPtrs into an arena. In a forked child the parent's memory is not found, and is not the child's to
/// free.
void free_block(void* memory) {
  blocks().free(memory);
}

}  // namespace

/// c10's CPU allocator, except in threads with an ArenaAllocation.
class ArenaAllocator final : public c10::Allocator {
 public:
  static void install() {
    static std::once_flag once;
    std::call_once(once, [] {
      auto* allocator = new ArenaAllocator(c10::GetCPUAllocator());  // for good
      constexpr uint8_t kPriority = 1;                               // above the default
      c10::SetCPUAllocator(allocator, kPriority);
    });
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (current != nullptr && bytes > 0) {
      if (void* memory = allocate_from_arena(bytes)) return {memory, memory, &free_block, c10::kCPU};
    }
    return usual_->allocate(bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &raw_delete; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  explicit ArenaAllocator(c10::Allocator* usual) : usual_(usual) { usual_deleter_ = usual->raw_deleter(); }

  static void raw_delete(void* memory) {
    if (!blocks().free(memory) && !transport::is_forked_memory(memory)) usual_deleter_(memory);
  }

  static void* allocate_from_arena(size_t bytes) {
    try {
      void* memory = current->arena_->allocate(bytes);
      blocks().add(memory, current->arena_);
      current->bytes_ += bytes;
      return memory;
    } catch (const c10::OutOfMemoryError& error) {
      LOCKSTEP_LOG(kInfo) << "a tensor of " << bytes
                          << " bytes is not placed in shared memory: " << error.what_without_backtrace();
      return nullptr;
    }
  }

  c10::Allocator* usual_;
  inline static c10::DeleterFnPtr usual_deleter_ = nullptr;
};

ArenaAllocation::ArenaAllocation(std::shared_ptr<transport::Arena> arena) : arena_(std::move(arena)) {
  TORCH_CHECK(current == nullptr, "this thread's tensors are placed in an arena already");
  ArenaAllocator::install();
  current = this;
}

ArenaAllocation::~ArenaAllocation() {
  current = nullptr;
}

}  // namespace lockstep
