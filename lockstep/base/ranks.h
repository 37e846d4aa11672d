#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// {0, 1, … world_size - 1}. Thread-safe.
std::vector<int> all_ranks(int world_size);

/// Ranks for a message: {3, 1, 4, 5, 9} → "1, 3-5 and 9". Sorts, drops doubles, joins three or more
/// neighbours to a range. After `at_most` entries (numbers or ranges) the rest is only counted: "0, 2, 4 and
/// 47 more". No ranks: "none".
std::string format_ranks(std::vector<int> ranks, int at_most = 12);

/// The same with the noun: "rank 3", "ranks 3 and 5".
std::string name_ranks(const std::vector<int>& ranks, int at_most = 12);

}  // namespace lockstep
