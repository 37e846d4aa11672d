#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include <lockstep/transport/host/groups/host_channel.h>

/// What the algorithms share: chunks that pass through the scratch, and the end of an operation.
namespace lockstep::collectives::internal::algorithms {

constexpr size_t kCacheLine = 64;
/// Whole cache lines for so many bytes.
constexpr size_t whole_lines(size_t bytes) {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

/// Bytes of a chunk, for tests that want many chunks from few bytes ("internal only", as Gloo's segment
/// size).
size_t chunk_bytes();
void set_chunk_bytes_for_testing(size_t bytes);

/// memcpy(3), which takes no null pointer: the data of an empty tensor.
inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

/// The two buffers in each rank's scratch, which chunks use in turn. Counts chunks over the group's whole
/// life, so that flags only grow.
class DoubleBuffer {
 public:
  explicit DoubleBuffer(transport::HostChannel& channel) : channel_(channel) {
    // A line for each peer at least. The same for all operations, so that both sides agree where a buffer is.
    capacity_ = whole_lines(std::max(chunk_bytes(), kCacheLine * static_cast<size_t>(channel.size())));
  }

  size_t capacity() const { return capacity_; }
  /// This rank's or another's buffer for chunk k.
  std::byte* own(size_t k) { return channel_.scratch(2 * capacity_) + (k & 1) * capacity_; }
  std::byte* of(int rank, size_t k) { return channel_.scratch_of(rank) + (k & 1) * capacity_; }
  /// The value of a flag once chunk k has passed.
  uint64_t number(size_t k) const { return channel_.chunk_base() + k + 1; }

 private:
  transport::HostChannel& channel_;
  size_t capacity_;
};

/// The last phase of every operation beyond the announcements.
void finish(transport::HostChannel& channel);

}  // namespace lockstep::collectives::internal::algorithms
