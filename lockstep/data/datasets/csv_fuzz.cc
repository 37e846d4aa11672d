// Any bytes as a CSV file, plain or compressed: as many rows as lines at most, or a c10::Error that is not
// about memory.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include <c10/util/Exception.h>

#include <lockstep/data/datasets/csv_dataset.h>
#include <lockstep/data/testing/test_files.h>
#include <lockstep/testing/fuzz_driver.h>
#include <lockstep/testing/memory_file.h>

namespace lockstep::csv_fuzz {
namespace {

std::vector<std::string> seeds() {
  const std::string quoted = "0\"a\",b\r\n\"1\",\"two \"\"words\"\"\n\"\r\n-2.5e3,x\r\n";
  return {"0a,b\n1,x\n2,y\n",
          "1"
          "1,2\n3,4\n",
          quoted,
          "2"
          "1,2\n,nan\n",
          "0\xef\xbb\xbf"
          "a,b\n1,2\n",
          "0" + data::gzip(quoted.substr(1)),
          "3" + data::gzip("1,2\n3,4\n")};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(csv, seeds) {
  if (size == 0) return 0;
  static const lockstep::testing::MemoryFile file;
  file.replace(data + 1, size - 1);
  lockstep::data::CsvOptions options{.header = (data[0] & 1) == 0};
  if ((data[0] & 2) != 0) options.fill_value = 0;
  if ((data[0] & 1) == 0) options.categories = {int64_t{1}};
  try {
    const lockstep::data::CsvDataset rows(file.path(), options);
    // deflate's best ratio; a row takes a byte and a line's end, but for the last
    if (rows.size() < 1 || static_cast<size_t>(rows.size()) > 1032 * size) std::abort();
    if (rows.features().size(1) != static_cast<int64_t>(rows.feature_names().size())) std::abort();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error&) {
    // what is documented
  }
  return 0;
}

}  // namespace lockstep::csv_fuzz
