#pragma once

#include <algorithm>
#include <cstddef>

#include <lockstep/collectives/algorithms/staging.h>

namespace lockstep::collectives::internal::algorithms {

/// A range of elements.
struct Range {
  size_t begin;
  size_t count;
};

/// Parts [first, last) of `count` elements cut into `parts`, on cache-line boundaries so that no line has two
/// writers.
inline Range slices_of(size_t count, size_t element_size, int parts, int first, int last) {
  const size_t per_line = std::max<size_t>(1, kCacheLine / element_size);
  const size_t lines = (count + per_line - 1) / per_line;
  const size_t begin = std::min(count, lines * first / parts * per_line);
  const size_t end = std::min(count, lines * last / parts * per_line);
  return {begin, end - begin};
}

/// Part `index` of them.
inline Range slice_of(size_t count, size_t element_size, int parts, int index) {
  return slices_of(count, element_size, parts, index, index + 1);
}

}  // namespace lockstep::collectives::internal::algorithms
