#pragma once

#include <cstdint>
#include <vector>

/// Where the dimensions of a device mesh lie in its list of ranks. Pure functions.
/// torch/distributed/_mesh_layout.py, _FlatLayout.
namespace lockstep::mesh::internal {

/// One dimension of a mesh: indices into the list of ranks that a nest of loops makes. One that was flattened
/// from several, which need not lie side by side, has several loops.
class Axis {
 public:
  struct Loop {
    int64_t size;
    int64_t stride;
    bool operator==(const Loop&) const = default;
  };

  /// The outermost loop first. Loops of one round are left out, and two that make the indices of one become
  /// that one, so equal axes have equal loops.
  explicit Axis(const std::vector<Loop>& loops);
  bool operator==(const Axis&) const = default;

  const std::vector<Loop>& loops() const { return loops_; }
  int64_t size() const;
  /// The indices, from 0.
  std::vector<int64_t> indices() const;

 private:
  std::vector<Loop> loops_;
};

/// The dimensions of a mesh whose list of ranks is in row-major order. Sizes are at least 1.
std::vector<Axis> row_major(const std::vector<int64_t>& sizes);

/// All axes as one: the last one's index runs fastest.
Axis joined(const std::vector<Axis>& axes);

/// Whether no index is made twice.
bool is_injective(const Axis& axis);

/// Whether later loops have smaller strides: the order of the root mesh's dimensions.
bool has_descending_strides(const Axis& axis);

/// Where the copies of the axis begin that together make each of `total` indices once, ascending. The axis is
/// injective.
std::vector<int64_t> origins(const Axis& axis, int64_t total);

}  // namespace lockstep::mesh::internal
