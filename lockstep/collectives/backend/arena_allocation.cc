#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/log.h>
#include <lockstep/collectives/backend/arena_allocation.h>

namespace lockstep {
namespace {

class ArenaOwner final : public MemoryOwner {
 public:
  explicit ArenaOwner(std::shared_ptr<transport::Arena> arena) : arena_(std::move(arena)) {}
  void* allocate(size_t bytes) { return arena_->allocate(bytes); }
  void deallocate(void* memory) override { arena_->deallocate(memory); }

 private:
  std::shared_ptr<transport::Arena> arena_;
};

}  // namespace

class ArenaAllocation::Source final : public MemorySource {
 public:
  explicit Source(std::shared_ptr<transport::Arena> arena)
      : owner_(std::make_shared<ArenaOwner>(std::move(arena))) {}

  MemoryBlock allocate(size_t bytes) override {
    try {
      void* memory = owner_->allocate(bytes);
      bytes_ += bytes;
      return {memory, owner_};
    } catch (const c10::OutOfMemoryError& error) {
      LOCKSTEP_LOG(kInfo) << "a tensor of " << bytes
                          << " bytes is not placed in shared memory: " << error.what_without_backtrace();
      return {};
    }
  }
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<ArenaOwner> owner_;
  size_t bytes_ = 0;
};

ArenaAllocation::ArenaAllocation(std::shared_ptr<transport::Arena> arena)
    : source_(std::make_shared<Source>(std::move(arena))), before_(exchange_memory_source(source_)) {}

ArenaAllocation::~ArenaAllocation() {
  exchange_memory_source(std::move(before_));
}

size_t ArenaAllocation::bytes() const {
  return source_->bytes();
}

}  // namespace lockstep
