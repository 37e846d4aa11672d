#pragma once

#include <cstddef>
#include <memory>

#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep::transport {

/// A piece of memory that several processes map: a memfd, sealed so that no process can shrink it under a
/// reader. The mapping ends with the object, the memory with its last mapping in any process. One of create()
/// keeps its descriptor, which peers are sent; one of map() needs none any more.
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
  /// −1 of one that a peer sent.
  int fd() const { return fd_.get(); }

  // Of whole pages of a segment of create(); false with errno if the kernel refuses. The address stays the
  // same.
  /// Puts private pages with the same content in the place of the shared ones, in this process. The shared
  /// ones lose their content. False if not all could be replaced: some may have been.
  bool make_private(size_t offset, size_t bytes);
  /// Undoes it: the shared pages are there again, with what they hold now.
  bool share(size_t offset, size_t bytes);

 private:
  bool make_piece_private(size_t offset, size_t bytes);
  Segment(const UniqueFd& fd, size_t bytes);

  ForkGuard fork_guard_;
  UniqueFd fd_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace lockstep::transport
