#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/parallel/ddp/reducer/bucket_memory.h>
#include <lockstep/transport/group_channel.h>
#include <lockstep/transport/host/host_transport.h>
#include <lockstep/transport/host/memory/arena.h>

namespace lockstep {

at::Tensor shared_zeros(const ProcessGroup& group, int64_t numel, const at::TensorOptions& options) {
  // A device's tensors are the device's: a GPU reduces in its own memory, or copies from there.
  if (!options.device().is_cpu()) return at::zeros({numel}, options);
  auto backend = group->getBackend(options.device().type());
  if (!backend->supportsTensorAlloc(options.device().index())) return at::empty({numel}, options).zero_();
  // Zeroing touches the pages now instead of in the first step.
  return backend->allocateTensor(numel, options).zero_();
}

std::shared_ptr<transport::Arena> arena_of(const ProcessGroup& group) {
  const auto backend = lockstep_backend_of(*group);
  return backend ? backend->channel().transport().shared_arena() : nullptr;
}

BucketMemory::BucketMemory(at::Tensor buffer, std::vector<size_t> offsets,
                           std::shared_ptr<transport::Arena> arena)
    : buffer_(std::move(buffer)),
      base_(static_cast<std::byte*>(buffer_.mutable_data_ptr())),
      offsets_(std::move(offsets)),
      arena_(std::move(arena)),
      taken_(offsets_.size(), false) {}

bool BucketMemory::taken(size_t slot) const {
  std::lock_guard lock(mutex_);
  return taken_[slot];
}

bool BucketMemory::any_taken() const {
  std::lock_guard lock(mutex_);
  return std::find(taken_.begin(), taken_.end(), true) != taken_.end();
}

MemoryBlock BucketMemory::take(size_t slot) {
  std::lock_guard lock(mutex_);
  if (taken_[slot]) return {};
  taken_[slot] = true;
  taken_bytes_ += end_of(slot) - offsets_[slot];
  return {address(slot), shared_from_this()};
}

void BucketMemory::deallocate(void* memory) {
  const auto offset = static_cast<size_t>(static_cast<std::byte*>(memory) - base_);
  // The last of equal offsets: those before it are slots of no bytes, which are never lent.
  const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), offset);
  const auto slot = static_cast<size_t>(after - offsets_.begin()) - 1;
  std::lock_guard lock(mutex_);
  taken_[slot] = false;
  taken_bytes_ -= end_of(slot) - offsets_[slot];
  if (phase_ != Phase::kInUse) give_back_pages(slot);
}

void BucketMemory::abandon() {
  std::lock_guard lock(mutex_);
  enter(Phase::kAbandoned);
  give_back_pages(0);
}

void BucketMemory::enter(Phase next) {
  TORCH_INTERNAL_ASSERT(next > phase_);
  phase_ = next;
}

size_t BucketMemory::end_of(size_t slot) const {
  return slot + 1 < offsets_.size() ? offsets_[slot + 1] : buffer_.nbytes();
}

/// `freed`: the slot that has just become free. Nothing is taken any more, so once the conditions hold they
/// hold until the last slot is free.
void BucketMemory::give_back_pages(size_t freed) {
  if (!arena_ || taken_bytes_ == 0 || 2 * taken_bytes_ >= buffer_.nbytes() ||
      buffer_.storage().use_count() > 1) {
    return;
  }
  if (phase_ == Phase::kGivingBack) {
    while (freed > 0 && !taken_[freed - 1]) --freed;
    give_back_run(freed);
    return;
  }
  enter(Phase::kGivingBack);
  for (size_t slot = 0; slot < offsets_.size(); ++slot) {
    if (!taken_[slot]) slot = give_back_run(slot);
  }
}

/// Of the free slots from `first` on, up to the next that is taken. Returns the one after them.
size_t BucketMemory::give_back_run(size_t first) {
  size_t last = first;
  while (last + 1 < offsets_.size() && !taken_[last + 1]) ++last;
  arena_->give_back_pages(base_ + offsets_[first], end_of(last) - offsets_[first]);
  return last + 1;
}

}  // namespace lockstep
