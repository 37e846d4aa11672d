#include <mutex>
#include <unordered_map>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <lockstep/base/process/per_process.h>
#include <lockstep/collectives/backend/memory_source.h>
#include <lockstep/transport/host/memory/forked_memory.h>

namespace lockstep {
namespace {

/// What each allocation looks at; `current_holder` keeps it alive.
thread_local constinit MemorySource* current = nullptr;

struct Holder {
  std::shared_ptr<MemorySource> source;
  ~Holder() { current = nullptr; }  // this thread's later destructors may still make tensors
};
thread_local Holder current_holder;

/// Blocks that are in use. c10 frees raw memory (raw_deallocate) by its address alone.
class Blocks {
 public:
  void add(const MemoryBlock& block) {
    std::lock_guard lock(mutex_);
    owners_.emplace(block.memory, block.owner);
  }
  /// False if the memory is of no block.
  bool free(void* memory) {
    std::shared_ptr<MemoryOwner> owner;
    {
      std::lock_guard lock(mutex_);
      const auto found = owners_.find(memory);
      if (found == owners_.end()) return false;
      owner = std::move(found->second);
      owners_.erase(found);
    }
    owner->deallocate(memory);
    return true;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, std::shared_ptr<MemoryOwner>> owners_;
};

Blocks& blocks() {
  static PerProcess<Blocks> all;
  return all.get();
}

/// c10's CPU allocator, except in threads with a source.
class SourceAllocator final : public c10::Allocator {
 public:
  static void install() {
    static std::once_flag once;
    std::call_once(once, [] {
      auto* allocator = new SourceAllocator(c10::GetCPUAllocator());  // for good
      constexpr uint8_t kPriority = 1;                                // above the default
      c10::SetCPUAllocator(allocator, kPriority);
    });
  }

  c10::DataPtr allocate(size_t bytes) override {
    MemorySource* source = current;
    if (source == nullptr || bytes == 0) return usual_->allocate(bytes);
    if (const MemoryBlock block = source->allocate(bytes); block.memory != nullptr) {
      lend(block);
      return {block.memory, block.memory, &give_back, c10::kCPU};
    }
    c10::DataPtr pointer = usual_->allocate(bytes);
    source->allocated_elsewhere(pointer.get(), bytes);
    return pointer;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &raw_delete; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  explicit SourceAllocator(c10::Allocator* usual) : usual_(usual) { usual_deleter_ = usual->raw_deleter(); }

  static void raw_delete(void* memory) {
    if (!blocks().free(memory) && !transport::is_forked_memory(memory)) usual_deleter_(memory);
  }

  c10::Allocator* usual_;
  inline static c10::DeleterFnPtr usual_deleter_ = nullptr;
};

}  // namespace

std::shared_ptr<MemorySource> exchange_memory_source(std::shared_ptr<MemorySource> source) {
  if (source) SourceAllocator::install();
  current = source.get();
  return std::exchange(current_holder.source, std::move(source));
}

void lend(const MemoryBlock& block) {
  blocks().add(block);
}

void give_back(void* memory) {
  // In a forked child the parent's memory is not found, and is not the child's to free.
  blocks().free(memory);
}

}  // namespace lockstep
