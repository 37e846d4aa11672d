#pragma once

#include <algorithm>
#include <vector>

namespace lockstep::doctor::internal {

/// The lower one of an even number: with four ranks half of the pairs are slow because of one slow rank. 0 of none.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[(values.size() - 1) / 2];
}

}  // namespace lockstep::doctor::internal
