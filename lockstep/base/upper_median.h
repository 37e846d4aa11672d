#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace lockstep {

/// The median; of an even number of values the upper one of the two in the middle. There must be a value. Thread-safe.
inline double upper_median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace lockstep
