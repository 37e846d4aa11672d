#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <lockstep/base/process/fork_guard.h>

namespace lockstep::transport {

/// A second mapping of shared memory, at another address, through which nothing can be written: for memory that its owner
/// alone may write, through the first mapping. It sees what is written there at once. A write through it ends the process
/// by SIGSEGV, with a note on standard error that names what lies at the address; a handler of SIGSEGV that the program has
/// installed before the first view runs after the note is written.
///
/// It keeps the pages, whatever becomes of the first mapping. Forked children have none of it. Thread-safe.
class ReadOnlyView {
 public:
  /// What lies at [offset, offset + bytes).
  struct Part {
    size_t offset;
    size_t bytes;
    std::string name;
  };

  /// `shared`: whole pages of a Segment's mapping. Throws c10::DistBackendError when the kernel refuses.
  ReadOnlyView(std::byte* shared, size_t bytes, std::vector<Part> parts);
  ReadOnlyView(const ReadOnlyView&) = delete;
  ReadOnlyView& operator=(const ReadOnlyView&) = delete;
  ~ReadOnlyView();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  ForkGuard fork_guard_;
  std::byte* data_ = nullptr;
  size_t size_;
};

}  // namespace lockstep::transport
