#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/serialization/object_conversion.h>

namespace lockstep {
namespace fsdp {

/// A rank's part of a whole tensor.
struct ShardedTensor {
  at::Tensor
      local;  ///< rows [row, row + local.size(0)) of the whole; for a number it has one element, or none
  int64_t row = 0;
  std::vector<int64_t> global_sizes;  ///< of the whole
};
using ShardedStateDict = std::vector<std::pair<std::string, ShardedTensor>>;

}  // namespace fsdp

/// As {"local": …, "row": …, "global_sizes": […], "mesh_dim": "shard"}, which checkpoints know for a part of a tensor
/// (serialization/tensor_part.h). Older objects have no "mesh_dim".
template <>
struct ObjectConversion<fsdp::ShardedTensor> {
  static c10::IValue to(const fsdp::ShardedTensor& tensor);
  static fsdp::ShardedTensor from(const c10::IValue& object);
};

}  // namespace lockstep
