// Any bytes as an IDX file, plain or compressed: a tensor that the file can hold, or a c10::Error that is not
// about memory.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/base/unique_fd.h>
#include <lockstep/data/datasets/idx.h>
#include <lockstep/data/testing/test_files.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::idx_fuzz {
namespace {

std::vector<std::string> seeds() {
  using data::gzip;
  using data::idx_header;
  const std::string bytes = idx_header(0x08, {2, 3}) + "123456";
  const std::string doubles = idx_header(0x0e, {1, 2}) + std::string(16, '\x3f');
  return {bytes,
          doubles,
          idx_header(0x0b, {3}) + "abcdef",
          idx_header(0x08, {0, 28, 28}),
          gzip(bytes),
          gzip(doubles.substr(0, 9)) + gzip(doubles.substr(9)),
          gzip(idx_header(0x08, {100, 100}) + std::string(10'000, 'x'))};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(idx, seeds) {
  // A file without a disk; each read_idx() opens it anew, at its beginning.
  static const lockstep::UniqueFd file(::memfd_create("idx", MFD_CLOEXEC));
  static const std::string path = "/proc/self/fd/" + std::to_string(file.get());
  if (::ftruncate(file.get(), 0) != 0 || ::pwrite(file.get(), data, size, 0) != static_cast<ssize_t>(size)) {
    std::abort();
  }
  try {
    const at::Tensor tensor = lockstep::data::read_idx(path);
    // deflate's best ratio; a plain file holds less
    if (tensor.nbytes() > 1032 * size || !tensor.is_contiguous()) std::abort();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error&) {
    // what is documented
  }
  return 0;
}

}  // namespace lockstep::idx_fuzz
