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

#include <lockstep/base/process/fork_guard.h>
#include <lockstep/device/host_memory.h>
#include <lockstep/transport/host/memory/segment.h>

namespace lockstep::transport {

/// Where memory lies within its owner's arena; the same for every process that maps it.
struct MemoryReference {
  uint32_t segment = 0;
  uint64_t offset = 0;
};

/// A piece of arena memory as one word that fits into a flag or a store; 0 means none. It must begin on a
/// cache line.
uint64_t pack_reference(const MemoryReference& reference);
MemoryReference unpack_reference(uint64_t word);

/// Hands out memory that all peers on this host can read and write. One per rank; only the owner allocates.
///
/// The arena grows by further segments and never shrinks or moves. Memory is not zeroed. Blocks of a page or
/// more have whole pages of their own, smaller ones whole cache lines. Thread-safe. Lifetime: the holder of
/// memory holds the arena (shared_ptr).
class Arena {
 public:
  static constexpr size_t kMaxSegments = 1024;
  /// Told about each new segment before memory from it is handed out; runs under the arena's lock. Where it throws, no
  /// memory of the segment is ever handed out.
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
  /// Gives the whole pages in `bytes` at `memory` back to the system, for all ranks: they cost nothing until
  /// they are touched again, and are zero then. They stay a part of the block that they lie in. Does nothing
  /// for memory elsewhere, for page-locked segments (a device knows their pages), in forked children, and
  /// where the system can't.
  void give_back_pages(std::byte* memory, size_t bytes);
  /// Page-locks the segment that `memory`, of allocate(), lies in for copies of this kind of device
  /// (device/host_memory.h): once for each segment and kind, until the arena goes. Does nothing where no registrar
  /// is installed; where it refuses, copies are slower but right.
  void page_lock(const void* memory, c10::DeviceType device);
  /// The reference of `bytes` at `memory` if peers can read them there: they lie wholly in this arena and are
  /// not detached. Lock-free while nothing is detached.
  std::optional<MemoryReference> find(const void* memory, size_t bytes) const;
  /// The same for memory that peers are to write: only if it can be detached later, that is, if it shares no
  /// page with anything else, and no device knows its pages.
  std::optional<MemoryReference> find_writable(const void* memory, size_t bytes) const;

  /// Takes memory of find_writable() away from the peers for good: other pages, with the same content, take
  /// the place of those that peers have mapped, which a peer that is late may still write. Only this thread
  /// may use the memory meanwhile. Throws c10::OutOfMemoryError: then peers may still write some of it, and it counts as
  /// detached all the same.
  /// Each call is undone by one reattach(), once no peer can write any more; the pages that the peers have
  /// become usable again when the memory has been given back, too.
  void detach(const void* memory, size_t bytes);
  void reattach(const void* memory);

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

  struct Block {
    uint32_t segment;
    size_t bytes;             // what it takes up
    size_t requested;         // what was asked for
    bool given_back = false;  // but parts of it are still detached
  };
  struct Detached {
    size_t bytes;
    int users;  // calls of detach() without their reattach()
  };
  using Blocks = std::map<std::byte*, Block>;

  void add_segment(size_t at_least);
  std::byte* allocate_from(uint32_t index, size_t bytes, size_t requested, size_t alignment);
  // Under the mutex:
  Blocks::const_iterator block_of(const void* memory, size_t bytes) const;
  bool is_detached(const void* memory, size_t bytes) const;
  void give_back(Blocks::iterator block);
  bool is_page_locked(uint32_t segment) const;

  const size_t segment_bytes_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<std::map<size_t, size_t>> free_;  // per segment: offset → bytes, no two adjacent
  Blocks used_;
  std::map<std::byte*, Detached> detached_;  // whole pages, no two overlap
  std::atomic<size_t> detached_count_{0};    // its size
  size_t bytes_in_use_ = 0;
  std::vector<PageLock> page_locks_;
  ForkGuard fork_guard_;
  SegmentListener listener_;
  std::array<Range, kMaxSegments> ranges_;  // for find(): written once each, begin last
  std::atomic<uint32_t> range_count_{0};
};

}  // namespace lockstep::transport
