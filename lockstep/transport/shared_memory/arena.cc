#include <algorithm>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/transport/shared_memory/arena.h>

namespace lockstep::transport {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kPage = 4096;

constexpr size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

Arena::Arena(size_t segment_bytes, size_t reserved) : segment_bytes_(round_up(segment_bytes, kPage)) {
  std::lock_guard lock(mutex_);
  add_segment(reserved + kPage);
  if (reserved > 0) allocate_from(0, reserved, kPage);
}

Arena::~Arena() {
  if (fork_guard_.in_forked_child())
    return;  // the mappings, and what the device knows of them, are the parent's
  for (const PageLock& lock : page_locks_) {
    if (lock.registrar != nullptr) lock.registrar->unlock(segments_[lock.segment]->data());
  }
}

std::byte* Arena::allocate(size_t bytes) {
  const size_t alignment = bytes >= kPage ? kPage : kCacheLine;
  bytes = round_up(std::max<size_t>(bytes, 1), kCacheLine);
  std::lock_guard lock(mutex_);
  for (uint32_t index = 0; index < segments_.size(); ++index) {
    if (std::byte* memory = allocate_from(index, bytes, alignment)) return memory;
  }
  add_segment(bytes);
  return allocate_from(static_cast<uint32_t>(segments_.size() - 1), bytes, alignment);
}

std::byte* Arena::allocate_from(uint32_t index, size_t bytes, size_t alignment) {
  auto& free = free_[index];
  for (auto hole = free.begin(); hole != free.end(); ++hole) {
    const auto [offset, size] = *hole;
    const size_t start = round_up(offset, alignment);
    if (start + bytes > offset + size) continue;
    free.erase(hole);
    if (start > offset) free.emplace(offset, start - offset);
    if (start + bytes < offset + size) free.emplace(start + bytes, offset + size - start - bytes);
    std::byte* memory = segments_[index]->data() + start;
    used_.emplace(memory, std::pair(index, bytes));
    bytes_in_use_ += bytes;
    return memory;
  }
  return nullptr;
}

void Arena::deallocate(void* memory) {
  std::lock_guard lock(mutex_);
  auto found = used_.find(static_cast<std::byte*>(memory));
  TORCH_INTERNAL_ASSERT(found != used_.end(), "memory that this arena did not hand out");
  auto [index, bytes] = found->second;
  auto& free = free_[index];
  auto [hole, inserted] = free.emplace(static_cast<std::byte*>(memory) - segments_[index]->data(), bytes);
  TORCH_INTERNAL_ASSERT(inserted);
  if (auto next = std::next(hole); next != free.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    free.erase(next);
  }
  if (hole != free.begin()) {
    if (auto previous = std::prev(hole); previous->first + previous->second == hole->first) {
      previous->second += hole->second;
      free.erase(hole);
    }
  }
  bytes_in_use_ -= bytes;
  used_.erase(found);
}

void Arena::page_lock(const void* memory, c10::DeviceType device) {
  HostMemoryRegistrar* registrar = host_memory_registrar(device);
  if (registrar == nullptr) return;
  std::lock_guard lock(mutex_);
  const auto found = used_.find(static_cast<const std::byte*>(memory));
  TORCH_INTERNAL_ASSERT(found != used_.end(), "memory that this arena did not hand out");
  const uint32_t index = found->second.first;
  const bool known = std::any_of(page_locks_.begin(), page_locks_.end(), [&](const PageLock& one) {
    return one.segment == index && one.device == device;
  });
  if (known) return;
  const bool locked = registrar->lock(segments_[index]->data(), segments_[index]->size());
  page_locks_.push_back({index, device, locked ? registrar : nullptr});
}

void Arena::add_segment(size_t at_least) {
  TORCH_CHECK_WITH(OutOfMemoryError, segments_.size() < kMaxSegments, "an arena has at most ", kMaxSegments,
                   " segments");
  auto segment = Segment::create(std::max(segment_bytes_, round_up(at_least, kPage)));
  const auto index = static_cast<uint32_t>(segments_.size());
  if (listener_) listener_(index, segment);
  free_.push_back({{0, segment->size()}});
  ranges_[index].bytes = segment->size();
  // Release: whoever sees the count or the address sees the size.
  ranges_[index].begin.store(segment->data(), std::memory_order_release);
  range_count_.store(index + 1, std::memory_order_release);
  segments_.push_back(std::move(segment));
}

std::optional<MemoryReference> Arena::find(const void* memory, size_t bytes) const {
  const auto* address = static_cast<const std::byte*>(memory);
  const uint32_t count = range_count_.load(std::memory_order_acquire);
  for (uint32_t index = 0; index < count; ++index) {
    const std::byte* begin = ranges_[index].begin.load(std::memory_order_relaxed);
    if (address >= begin && address + bytes <= begin + ranges_[index].bytes) {
      return MemoryReference{index, static_cast<uint64_t>(address - begin)};
    }
  }
  return std::nullopt;
}

std::shared_ptr<Segment> Arena::segment(uint32_t index) const {
  std::lock_guard lock(mutex_);
  return segments_.at(index);
}

void Arena::set_listener(SegmentListener listener) {
  std::lock_guard lock(mutex_);
  listener_ = std::move(listener);
}

size_t Arena::bytes_in_use() const {
  std::lock_guard lock(mutex_);
  return bytes_in_use_;
}

}  // namespace lockstep::transport
