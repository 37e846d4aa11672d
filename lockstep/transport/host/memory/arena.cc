#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <sys/mman.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/base/log.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/transport/host/memory/arena.h>

namespace lockstep::transport {
namespace {

constexpr size_t kCacheLine = 64;

constexpr size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::byte* page_of(const void* memory) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(memory) / page_bytes() * page_bytes());
}

}  // namespace

uint64_t pack_reference(const MemoryReference& reference) {
  // Offsets are multiples of a cache line.
  return (uint64_t{reference.segment} << 44 | reference.offset >> 6) + 1;
}
MemoryReference unpack_reference(uint64_t word) {
  --word;
  return {static_cast<uint32_t>(word >> 44), (word & ((uint64_t{1} << 44) - 1)) << 6};
}

Arena::Arena(size_t segment_bytes, size_t reserved) : segment_bytes_(round_up(segment_bytes, page_bytes())) {
  std::lock_guard lock(mutex_);
  add_segment(reserved + page_bytes());
  if (reserved > 0) allocate_from(0, reserved, reserved, page_bytes());
}

Arena::~Arena() {
  if (fork_guard_.in_forked_child())
    return;  // the mappings, and what the device knows of them, are the parent's
  for (const PageLock& lock : page_locks_) {
    if (lock.registrar != nullptr) lock.registrar->unlock(segments_[lock.segment]->data());
  }
}

std::byte* Arena::allocate(size_t requested) {
  const size_t alignment = requested >= page_bytes() ? page_bytes() : kCacheLine;
  const size_t bytes = round_up(std::max<size_t>(requested, 1), alignment);
  std::lock_guard lock(mutex_);
  for (uint32_t index = 0; index < segments_.size(); ++index) {
    if (std::byte* memory = allocate_from(index, bytes, requested, alignment)) return memory;
  }
  add_segment(bytes);
  return allocate_from(static_cast<uint32_t>(segments_.size() - 1), bytes, requested, alignment);
}

std::byte* Arena::allocate_from(uint32_t index, size_t bytes, size_t requested, size_t alignment) {
  auto& free = free_[index];
  for (auto hole = free.begin(); hole != free.end(); ++hole) {
    const auto [offset, size] = *hole;
    const size_t start = round_up(offset, alignment);
    if (start + bytes > offset + size) continue;
    free.erase(hole);
    if (start > offset) free.emplace(offset, start - offset);
    if (start + bytes < offset + size) free.emplace(start + bytes, offset + size - start - bytes);
    std::byte* memory = segments_[index]->data() + start;
    used_.emplace(memory, Block{index, bytes, requested});
    bytes_in_use_ += bytes;
    return memory;
  }
  return nullptr;
}

void Arena::deallocate(void* memory) {
  std::lock_guard lock(mutex_);
  const auto found = used_.find(static_cast<std::byte*>(memory));
  TORCH_INTERNAL_ASSERT(found != used_.end() && !found->second.given_back,
                        "memory that this arena did not hand out");
  found->second.given_back = true;
  give_back(found);
}

/// Makes a block free that was given back, unless peers may still write parts of it.
void Arena::give_back(Blocks::iterator block) {
  std::byte* const memory = block->first;
  const auto [index, bytes, requested, given_back] = block->second;
  Segment& segment = *segments_[index];
  const auto first = detached_.lower_bound(memory);
  const auto last = detached_.lower_bound(memory + bytes);
  for (auto part = first; part != last; ++part) {
    if (part->second.users > 0) return;
  }
  for (auto part = first; part != last; ++part) {
    if (!segment.share(part->first - segment.data(), part->second.bytes)) {
      LOCKSTEP_LOG(kWarning) << format_bytes(static_cast<int64_t>(bytes))
                             << " of shared memory can't be used again: " << std::strerror(errno);
      return;
    }
  }
  detached_.erase(first, last);
  detached_count_.store(detached_.size(), std::memory_order_release);

  auto& free = free_[index];
  auto [hole, inserted] = free.emplace(memory - segment.data(), bytes);
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
  used_.erase(block);
}

// ---- memory that peers may write no more

/// The block in which all of this lies.
Arena::Blocks::const_iterator Arena::block_of(const void* memory, size_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(memory);
  auto block = used_.upper_bound(const_cast<std::byte*>(begin));
  if (block == used_.begin()) return used_.end();
  --block;
  return begin + bytes <= block->first + block->second.bytes ? block : used_.end();
}

bool Arena::is_detached(const void* memory, size_t bytes) const {
  auto* begin = page_of(memory);
  const auto* end = static_cast<const std::byte*>(memory) + bytes;
  auto part = detached_.upper_bound(begin);
  if (part != detached_.end() && part->first < end) return true;
  return part != detached_.begin() && std::prev(part)->first + std::prev(part)->second.bytes > begin;
}

std::optional<MemoryReference> Arena::find_writable(const void* memory, size_t bytes) const {
  const auto reference = find(memory, bytes);
  if (!reference || page_of(memory) != memory) return std::nullopt;
  std::lock_guard lock(mutex_);
  const auto block = block_of(memory, bytes);
  if (block == used_.end() || block->second.requested < page_bytes()) return std::nullopt;
  const auto* end = static_cast<const std::byte*>(memory) + bytes;
  const bool whole_pages = page_of(end) == end || end >= block->first + block->second.requested;
  return whole_pages && !is_page_locked(block->second.segment) ? reference : std::nullopt;
}

void Arena::detach(const void* memory, size_t bytes) {
  std::lock_guard lock(mutex_);
  const auto block = block_of(memory, bytes);
  TORCH_INTERNAL_ASSERT(block != used_.end() && page_of(memory) == memory, "memory that can't be detached");
  std::byte* begin = page_of(memory);
  std::byte* end = begin + round_up(bytes, page_bytes());
  int users = 1;
  // Two operations at once on the same memory are a mistake of the caller; it stays one piece then.
  while (is_detached(begin, end - begin)) {
    auto part = std::prev(detached_.lower_bound(end));
    begin = std::min(begin, part->first);
    end = std::max(end, part->first + part->second.bytes);
    users += part->second.users;
    detached_.erase(part);
  }
  detached_.emplace(begin, Detached{static_cast<size_t>(end - begin), users});
  detached_count_.store(detached_.size(), std::memory_order_release);
  Segment& segment = *segments_[block->second.segment];
  if (segment.make_private(begin - segment.data(), end - begin)) return;
  const int error = errno;
  // It counts as detached, for some of its pages may be private by now.
  TORCH_CHECK_WITH(OutOfMemoryError, false, format_bytes(static_cast<int64_t>(bytes)),
                   " of shared memory could not be taken away from the peers: ", std::strerror(error));
}

void Arena::reattach(const void* memory) {
  std::lock_guard lock(mutex_);
  auto part = detached_.upper_bound(page_of(memory));
  TORCH_INTERNAL_ASSERT(part != detached_.begin(), "memory that is not detached");
  --part;
  TORCH_INTERNAL_ASSERT(part->second.users > 0, "memory that is not detached");
  --part->second.users;
  auto block = std::prev(used_.upper_bound(part->first));
  if (block->second.given_back) give_back(block);
}

// ---- the rest

void Arena::give_back_pages(std::byte* memory, size_t bytes) {
  if (fork_guard_.in_forked_child()) return;  // the child has something else at this address
  const auto reference = find(memory, bytes);
  if (!reference) return;
  const size_t begin = round_up(reference->offset, page_bytes());  // in the segment, which begins on a page
  const size_t end = (reference->offset + bytes) / page_bytes() * page_bytes();
  if (begin >= end) return;
  std::lock_guard lock(mutex_);
  if (!is_page_locked(reference->segment))
    ::madvise(memory + (begin - reference->offset), end - begin, MADV_REMOVE);
}

void Arena::page_lock(const void* memory, c10::DeviceType device) {
  HostMemoryRegistrar* registrar = host_memory_registrar(device);
  if (registrar == nullptr) return;
  std::lock_guard lock(mutex_);
  const auto found = used_.find(static_cast<std::byte*>(const_cast<void*>(memory)));
  TORCH_INTERNAL_ASSERT(found != used_.end(), "memory that this arena did not hand out");
  const uint32_t index = found->second.segment;
  const bool known = std::any_of(page_locks_.begin(), page_locks_.end(), [&](const PageLock& one) {
    return one.segment == index && one.device == device;
  });
  if (known) return;
  const bool locked = registrar->lock(segments_[index]->data(), segments_[index]->size());
  page_locks_.push_back({index, device, locked ? registrar : nullptr});
}

bool Arena::is_page_locked(uint32_t segment) const {
  return std::any_of(page_locks_.begin(), page_locks_.end(), [&](const PageLock& lock) {
    return lock.segment == segment && lock.registrar != nullptr;
  });
}

void Arena::add_segment(size_t at_least) {
  TORCH_CHECK_WITH(OutOfMemoryError, segments_.size() < kMaxSegments, "an arena has at most ", kMaxSegments,
                   " segments");
  auto segment = Segment::create(std::max(segment_bytes_, round_up(at_least, page_bytes())));
  const auto index = static_cast<uint32_t>(segments_.size());
  // The number is used up, though the listener may throw: some peers may have this segment by it already.
  segments_.push_back(segment);
  free_.emplace_back();
  if (listener_) listener_(index, segment);
  free_.back().emplace(0, segment->size());
  ranges_[index].bytes = segment->size();
  // Release: a process that sees the count or the address sees the size.
  ranges_[index].begin.store(segment->data(), std::memory_order_release);
  range_count_.store(index + 1, std::memory_order_release);
}

std::optional<MemoryReference> Arena::find(const void* memory, size_t bytes) const {
  const auto* address = static_cast<const std::byte*>(memory);
  const uint32_t count = range_count_.load(std::memory_order_acquire);
  for (uint32_t index = 0; index < count; ++index) {
    const std::byte* begin = ranges_[index].begin.load(std::memory_order_relaxed);
    if (address >= begin && address + bytes <= begin + ranges_[index].bytes) {
      if (detached_count_.load(std::memory_order_acquire) > 0) {
        std::lock_guard lock(mutex_);
        if (is_detached(memory, bytes)) return std::nullopt;
      }
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
