#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include <lockstep/base/fork_guard.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep::transport {

/// A piece of memory that several processes map: a memfd, sealed so that nobody can shrink it under a reader.
/// Immutable after construction; the mapping ends with the object, the memory with its last mapping in any
/// process.
class Segment {
 public:
  /// Makes and maps a segment of `bytes` (a multiple of the page size). Pages cost memory once they are
  /// touched, but the whole is checked against the memory that is left. Throws c10::OutOfMemoryError, or
  /// c10::DistBackendError when the kernel refuses.
  static std::shared_ptr<Segment> create(size_t bytes);

  /// Maps a segment that a peer sent. Throws c10::DistBackendError unless it is sealed and as large as it
  /// claims.
  static std::shared_ptr<Segment> map(UniqueFd fd, size_t bytes);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int fd() const { return fd_.get(); }

 private:
  Segment(UniqueFd fd, size_t bytes);

  ForkGuard fork_guard_;
  UniqueFd fd_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace lockstep::transport
