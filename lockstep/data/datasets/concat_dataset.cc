#include <algorithm>

#include <c10/util/Exception.h>

#include <lockstep/data/datasets/concat_dataset.h>

namespace lockstep::data::internal {

PartPlace find_part(const std::vector<int64_t>& ends, int64_t index) {
  TORCH_CHECK_INDEX(index >= 0 && index < ends.back(), "index ", index,
                    " is out of range for a ConcatDataset with ", ends.back(), " samples");
  const auto part = std::upper_bound(ends.begin(), ends.end(), index) - ends.begin();
  return {static_cast<size_t>(part), part == 0 ? index : index - ends[static_cast<size_t>(part - 1)]};
}

std::vector<int64_t> ends_of(const std::vector<int64_t>& sizes) {
  TORCH_CHECK_VALUE(!sizes.empty(), "ConcatDataset: datasets should not be an empty iterable");
  std::vector<int64_t> ends;
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(size >= 0, "ConcatDataset: the size() of data set ", ends.size(), " is ", size);
    ends.push_back((ends.empty() ? 0 : ends.back()) + size);
  }
  return ends;
}

}  // namespace lockstep::data::internal
