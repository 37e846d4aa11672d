#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

namespace lockstep::serialization {

/// Where a tensor lies in a whole one, of which other ranks have other parts: element (i, j, …) of the part is element
/// (offsets[0] + i, offsets[1] + j, …) of the whole. Of a number, which has no dimensions, one rank's part has its one element,
/// and the others' have none; both lists are empty.
struct TensorPart {
  std::vector<int64_t> global_shape = {};
  std::vector<int64_t> offsets = {};
  std::string mesh_dim = {};  ///< the mesh's dimension over which the parts are spread, "shard"
  bool operator==(const TensorPart&) const = default;
};

/// The place of the tensor in an object of the form {"local": tensor, "row": n, "global_sizes": […]}, as fsdp::ShardedTensor
/// has, with or without "mesh_dim": "NAME"; nothing for any other object, also one whose tensor would lie beyond the whole.
std::optional<TensorPart> tensor_part_of(const c10::IValue& object);

/// Whether a part of this shape has its place in the whole.
bool lies_within(const TensorPart& part, const std::vector<int64_t>& shape);

/// Whether a part of this shape has all of the whole.
bool is_whole(const TensorPart& part, const std::vector<int64_t>& shape);

}  // namespace lockstep::serialization
