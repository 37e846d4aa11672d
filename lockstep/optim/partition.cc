#include <algorithm>
#include <numeric>

#include <c10/util/Exception.h>

#include <lockstep/optim/partition.h>

namespace lockstep {

Partition partition_parameters(const std::vector<std::vector<int64_t>>& numels, int world_size) {
  TORCH_CHECK_VALUE(world_size > 0, "partition_parameters: the world size is ", world_size,
                    "; it must be at least 1");
  Partition partition(static_cast<size_t>(world_size), std::vector<std::vector<size_t>>(numels.size()));
  std::vector<int64_t> loads(static_cast<size_t>(world_size), 0);
  for (size_t group = 0; group < numels.size(); ++group) {
    const auto& sizes = numels[group];
    std::vector<size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
    for (const size_t index : order) {
      const auto least = std::min_element(loads.begin(), loads.end());  // the first of several
      *least += sizes[index];
      partition[static_cast<size_t>(least - loads.begin())][group].push_back(index);
    }
  }
  return partition;
}

}  // namespace lockstep
