#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <lockstep/base/fork_guard.h>
#include <lockstep/device/host_memory.h>
#include <lockstep/transport/shared_memory/segment.h>

namespace lockstep::transport {

/// Where memory lies within its owner's arena; the same for every process that maps it.
struct MemoryReference {
  uint32_t segment = 0;
  uint64_t offset = 0;
};

/// Hands out memory that all peers on this host can read and write. One per rank; only the owner allocates.
///
/// The arena grows by further segments and never shrinks or moves. Memory is not zeroed. Blocks of a page or
/// more begin on a page, smaller ones on a cache line. Thread-safe. Lifetime: whoever holds memory holds the
/// arena (shared_ptr).
class Arena {
 public:
  static constexpr size_t kMaxSegments = 1024;
  /// Told about each new segment before memory from it is handed out; runs under the arena's lock.
  using SegmentListener = std::function<void(uint32_t index, const std::shared_ptr<Segment>&)>;

  /// `segment_bytes`: the size of a segment unless one allocation needs more. The first `reserved` bytes of
  /// segment 0 are never handed out (the process's header).
  Arena(size_t segment_bytes, size_t reserved);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  /// Undoes page_lock().
  ~Arena();

  /// Throws c10::OutOfMemoryError naming what is left. Zero bytes give a valid unique address.
  std::byte* allocate(size_t bytes);
  /// `memory` must come from allocate() of this arena.
  void deallocate(void* memory);
  /// Page-locks the segment that `memory`, of allocate(), lies in for copies of this kind of device
  /// (device/host_memory.h): once for each segment and kind, until the arena goes. Does nothing where nobody
  /// has installed a registrar; where it refuses, copies are slower but right.
  void page_lock(const void* memory, c10::DeviceType device);
  /// The reference of `bytes` at `memory` if they lie wholly in this arena. Lock-free.
  std::optional<MemoryReference> find(const void* memory, size_t bytes) const;

  std::shared_ptr<Segment> segment(uint32_t index) const;
  void set_listener(SegmentListener listener);
  /// Bytes now handed out, for tests and statistics.
  size_t bytes_in_use() const;

 private:
  struct Range {
    std::atomic<const std::byte*> begin{nullptr};
    size_t bytes = 0;
  };
  struct PageLock {
    uint32_t segment;
    c10::DeviceType device;
    HostMemoryRegistrar* registrar;  // null: it has refused
  };

  void add_segment(size_t at_least);
  std::byte* allocate_from(uint32_t index, size_t bytes, size_t alignment);

  const size_t segment_bytes_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<std::map<size_t, size_t>> free_;  // per segment: offset → bytes, no two adjacent
  std::map<const std::byte*, std::pair<uint32_t, size_t>> used_;  // address → segment, bytes
  size_t bytes_in_use_ = 0;
  std::vector<PageLock> page_locks_;
  ForkGuard fork_guard_;
  SegmentListener listener_;
  std::array<Range, kMaxSegments> ranges_;  // for find(): written once each, begin last
  std::atomic<uint32_t> range_count_{0};
};

}  // namespace lockstep::transport
