#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <lockstep/ddp/bucket_memory.h>

namespace lockstep {

at::Tensor shared_zeros(const ProcessGroup& group, int64_t numel, const at::TensorOptions& options) {
  // A device's tensors are the device's: a GPU reduces in its own memory, or copies from there.
  if (!options.device().is_cpu()) return at::zeros({numel}, options);
  auto backend = group->getBackend(options.device().type());
  if (!backend->supportsTensorAlloc(options.device().index())) return at::empty({numel}, options).zero_();
  // Zeroing touches the pages now instead of in the first step.
  return backend->allocateTensor(numel, options).zero_();
}

BucketMemory::BucketMemory(at::Tensor buffer, std::vector<size_t> offsets)
    : buffer_(std::move(buffer)),
      base_(static_cast<std::byte*>(buffer_.mutable_data_ptr())),
      offsets_(std::move(offsets)),
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
  return {address(slot), shared_from_this()};
}

void BucketMemory::deallocate(void* memory) {
  const auto offset = static_cast<size_t>(static_cast<std::byte*>(memory) - base_);
  // The last of equal offsets: those before it are slots of no bytes, which are never lent.
  const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), offset);
  std::lock_guard lock(mutex_);
  taken_[after - offsets_.begin() - 1] = false;
}

}  // namespace lockstep
