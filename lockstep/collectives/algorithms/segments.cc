#include <algorithm>

#include <lockstep/collectives/algorithms/segments.h>
#include <lockstep/collectives/algorithms/staging.h>

namespace lockstep::collectives::internal {

void Segments::put(const std::vector<Segment>& segments, algorithms::Window window) {
  size_t begin = 0;  // of the segment, within all that comes from the rank
  for (const Segment& segment : segments) {
    if (window.bytes == 0) return;
    const size_t end = begin + segment.bytes;
    if (window.offset < end) {
      const size_t bytes = std::min(window.bytes, end - window.offset);
      std::byte* to = segment.data + (window.offset - begin);
      if (to != window.data) algorithms::copy_bytes(to, window.data, bytes);
      window = {window.data + bytes, window.offset + bytes, window.bytes - bytes};
    }
    begin = end;
  }
}

}  // namespace lockstep::collectives::internal
