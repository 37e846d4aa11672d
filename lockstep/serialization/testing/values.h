#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <lockstep/serialization/object_conversion.h>
#include <lockstep/serialization/state_dict.h>

namespace lockstep::testing {

/// Whether two values are the same to the last bit; lists and dicts may differ in the type that they declare.
inline bool same(const c10::IValue& a, const c10::IValue& b) {
  if (a.isTensor() && b.isTensor()) {
    const at::Tensor& first = a.toTensor();
    const at::Tensor& second = b.toTensor();
    if (!first.defined() || !second.defined()) return first.defined() == second.defined();
    return first.scalar_type() == second.scalar_type() && first.sizes() == second.sizes() &&
           (first.numel() == 0 || std::memcmp(first.contiguous().const_data_ptr(),
                                              second.contiguous().const_data_ptr(), first.nbytes()) == 0);
  }
  if (a.isDouble() && b.isDouble()) {
    const double first = a.toDouble();
    const double second = b.toDouble();
    return std::memcmp(&first, &second, sizeof(first)) == 0;
  }
  if (a.isComplexDouble() && b.isComplexDouble()) {
    const auto first = a.toComplexDouble();
    const auto second = b.toComplexDouble();
    return std::memcmp(&first, &second, sizeof(first)) == 0;
  }
  const auto all_same = [](c10::ArrayRef<c10::IValue> first, c10::ArrayRef<c10::IValue> second) {
    bool equal = first.size() == second.size();
    for (size_t i = 0; equal && i < first.size(); ++i) equal = same(first[i], second[i]);
    return equal;
  };
  if (a.isList() && b.isList()) return all_same(a.toListRef(), b.toListRef());
  if (a.isTuple() && b.isTuple())
    return all_same(a.toTupleRef().elements().vec(), b.toTupleRef().elements().vec());
  if (a.isGenericDict() && b.isGenericDict()) {
    bool equal = a.toGenericDict().size() == b.toGenericDict().size();
    for (const auto& item : a.toGenericDict()) {
      equal = equal && b.toGenericDict().contains(item.key()) &&
              same(item.value(), b.toGenericDict().at(item.key()));
    }
    return equal;
  }
  return a.tagKind() == b.tagKind() && !a.isTensor() && a == b;
}

inline bool same(const StateDict& a, const StateDict& b) {
  return same(to_object(a), to_object(b));
}

template <class Key>
c10::IValue dict_of(std::vector<std::pair<Key, c10::IValue>> items) {
  auto dict = serialization::make_object_dict();
  for (auto& [key, value] : items) dict.insert(key, value);
  return dict;
}

}  // namespace lockstep::testing
