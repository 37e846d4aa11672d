#pragma once

#include <cstddef>
#include <cstdlib>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#include <lockstep/base/unique_fd.h>

namespace lockstep::testing {

/// A file without a disk. Each open() of its path begins at its beginning.
class MemoryFile {
 public:
  const std::string& path() const { return path_; }
  /// Ends the process where it can't.
  void replace(const void* data, size_t size) const {
    if (::ftruncate(file_.get(), 0) != 0 ||
        ::pwrite(file_.get(), data, size, 0) != static_cast<ssize_t>(size)) {
      std::abort();
    }
  }

 private:
  const UniqueFd file_{::memfd_create("lockstep-test", MFD_CLOEXEC)};
  const std::string path_ = "/proc/self/fd/" + std::to_string(file_.get());
};

}  // namespace lockstep::testing
