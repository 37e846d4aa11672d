#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <lockstep/serialization/tensor_part.h>

namespace lockstep::serialization {

std::optional<TensorPart> tensor_part_of(const c10::IValue& object) {
  if (!object.isGenericDict()) return {};
  const c10::IValue* local = nullptr;
  const c10::IValue* row = nullptr;
  const c10::IValue* sizes = nullptr;
  TensorPart part{.mesh_dim = "shard"};
  const auto dict = object.toGenericDict();
  std::vector<c10::IValue> values;  // of which the pointers are
  values.reserve(dict.size());
  for (const auto& item : dict) {
    if (!item.key().isString()) return {};
    const std::string& key = item.key().toStringRef();
    values.push_back(item.value());
    if (key == "local") {
      local = &values.back();
    } else if (key == "row") {
      row = &values.back();
    } else if (key == "global_sizes") {
      sizes = &values.back();
    } else if (key == "mesh_dim" && values.back().isString()) {
      part.mesh_dim = values.back().toStringRef();
    } else {
      return {};
    }
  }
  const bool complete = local != nullptr && row != nullptr && sizes != nullptr;
  if (!complete || !local->isTensor() || !local->toTensor().defined() || !row->isInt() || !sizes->isList())
    return {};
  for (const c10::IValue& size : sizes->toListRef()) {
    if (!size.isInt()) return {};
    part.global_shape.push_back(size.toInt());
  }
  part.offsets.resize(part.global_shape.size());
  if (!part.offsets.empty()) part.offsets[0] = row->toInt();
  if (!lies_within(part, local->toTensor().sizes().vec())) return {};
  return part;
}

bool lies_within(const TensorPart& part, const std::vector<int64_t>& shape) {
  const size_t dimensions = part.global_shape.size();
  if (part.offsets.size() != dimensions) return false;
  if (dimensions > 0 && shape.size() != dimensions) return false;
  for (size_t i = 0; i < dimensions; ++i) {
    const int64_t offset = part.offsets[i], global = part.global_shape[i];
    if (offset < 0 || offset > global || shape[i] > global - offset) return false;
  }
  return true;
}

bool is_whole(const TensorPart& part, const std::vector<int64_t>& shape) {
  if (!part.global_shape.empty()) return shape == part.global_shape;
  return shape.empty() || shape == std::vector<int64_t>{1};
}

}  // namespace lockstep::serialization
