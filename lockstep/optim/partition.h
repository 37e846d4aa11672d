#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

/// partition[rank][group]: which of the group's parameters the rank owns, by index, the largest first.
using Partition = std::vector<std::vector<std::vector<size_t>>>;

/// Gives every parameter to one rank, so that the ranks have about as many elements: group by group, the
/// largest parameters first, each to the rank that has the least so far. `numels[group]`: the parameters'
/// numbers of elements. A group that is appended later leaves the others' parameters where they are.
/// ZeroRedundancyOptimizer._partition_parameters of torch, with the same answers.
Partition partition_parameters(const std::vector<std::vector<int64_t>>& numels, int world_size);

}  // namespace lockstep
