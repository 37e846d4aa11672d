#include <algorithm>
#include <map>

#include <lockstep/parallel/ddp/reducer/bucket_assignment.h>

namespace lockstep {

std::vector<std::vector<size_t>> assign_buckets(const std::vector<ParameterSize>& sizes,
                                                const std::vector<size_t>& order,
                                                const std::vector<size_t>& caps) {
  struct Open {
    size_t bucket = 0;
    size_t bytes = 0;
    bool is_open = false;
    size_t closed = 0;  // buckets of this kind so far
  };
  std::vector<std::vector<size_t>> buckets;
  std::map<int, Open> open_by_kind;
  for (size_t index : order) {
    if (sizes[index].alone) {
      buckets.push_back({index});
      continue;
    }
    Open& open = open_by_kind[sizes[index].kind];
    if (!open.is_open) {
      open.bucket = buckets.size();
      open.bytes = 0;
      open.is_open = true;
      buckets.emplace_back();
    }
    buckets[open.bucket].push_back(index);
    open.bytes += sizes[index].bytes;
    if (open.bytes >= caps[std::min(open.closed, caps.size() - 1)]) {
      open.is_open = false;
      ++open.closed;
    }
  }
  return buckets;
}

}  // namespace lockstep
