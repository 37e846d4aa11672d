// Any bytes as an IDX file, plain or compressed: a tensor that the file can hold, or a c10::Error that is not
// about memory.
#include <cstdlib>
#include <string>

#include <c10/util/Exception.h>

#include <lockstep/data/datasets/idx.h>
#include <lockstep/data/testing/test_files.h>
#include <lockstep/testing/fuzz_driver.h>
#include <lockstep/testing/memory_file.h>

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
  static const lockstep::testing::MemoryFile file;
  file.replace(data, size);
  try {
    const at::Tensor tensor = lockstep::data::read_idx(file.path());
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
