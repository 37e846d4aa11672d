#include <algorithm>
#include <functional>

#include <lockstep/parallel/mesh/internal/mesh_layout.h>

namespace lockstep::mesh::internal {
namespace {

std::vector<Axis::Loop> by_descending_stride(const Axis& axis) {
  auto loops = axis.loops();
  std::ranges::sort(loops, std::greater<>(), &Axis::Loop::stride);
  return loops;
}

}  // namespace

Axis::Axis(const std::vector<Loop>& loops) {
  for (const Loop& loop : loops) {
    if (loop.size == 1) continue;
    if (!loops_.empty() && loops_.back().stride == loop.size * loop.stride) {
      loops_.back() = {loops_.back().size * loop.size, loop.stride};
    } else {
      loops_.push_back(loop);
    }
  }
}

int64_t Axis::size() const {
  int64_t size = 1;
  for (const Loop& loop : loops_) size *= loop.size;
  return size;
}

std::vector<int64_t> Axis::indices() const {
  std::vector<int64_t> indices{0};
  for (const Loop& loop : loops_) {
    std::vector<int64_t> outer = std::move(indices);
    indices.clear();
    for (const int64_t begin : outer) {
      for (int64_t round = 0; round < loop.size; ++round) indices.push_back(begin + round * loop.stride);
    }
  }
  return indices;
}

std::vector<Axis> row_major(const std::vector<int64_t>& sizes) {
  std::vector<Axis> axes;
  int64_t stride = 1;
  for (auto size = sizes.rbegin(); size != sizes.rend(); ++size) {
    axes.push_back(Axis({{*size, stride}}));
    stride *= *size;
  }
  std::reverse(axes.begin(), axes.end());
  return axes;
}

Axis joined(const std::vector<Axis>& axes) {
  std::vector<Axis::Loop> loops;
  for (const Axis& axis : axes) loops.insert(loops.end(), axis.loops().begin(), axis.loops().end());
  return Axis(loops);
}

bool is_injective(const Axis& axis) {
  const auto loops = by_descending_stride(axis);
  for (size_t i = 0; i + 1 < loops.size(); ++i) {
    if (loops[i].stride % (loops[i + 1].stride * loops[i + 1].size) != 0) return false;
  }
  return true;
}

bool has_descending_strides(const Axis& axis) {
  return std::ranges::is_sorted(axis.loops(), std::greater<>(), &Axis::Loop::stride);
}

std::vector<int64_t> origins(const Axis& axis, int64_t total) {
  // What the loops leave out: below each of them, and above the outermost.
  std::vector<Axis::Loop> gaps;
  int64_t above = total;
  for (const Axis::Loop& loop : by_descending_stride(axis)) {
    gaps.push_back({above / (loop.stride * loop.size), loop.stride * loop.size});
    above = loop.stride;
  }
  gaps.push_back({above, 1});
  return Axis(gaps).indices();
}

}  // namespace lockstep::mesh::internal
