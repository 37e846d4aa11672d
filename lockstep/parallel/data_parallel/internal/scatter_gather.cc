#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <lockstep/parallel/data_parallel/internal/scatter_gather.h>

namespace lockstep::internal {

Scattered scatter(const std::vector<at::Tensor>& tensors, const std::vector<at::Device>& devices,
                  int64_t dim) {
  Scattered answer;
  for (const auto& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.dim() > 0,
                      "DataParallel splits every tensor among the arguments along dimension ", dim,
                      ", but one has no dimensions; pass a number instead, or expand it to the batch");
    const int64_t parts = tensor.size(dim) == 0 ? 1 : static_cast<int64_t>(devices.size());
    auto chunks = tensor.chunk(parts, dim);
    const int count = static_cast<int>(chunks.size());
    if (answer.replicas == 0) answer.replicas = count;
    TORCH_CHECK_VALUE(count == answer.replicas, "DataParallel splits every tensor among the arguments into ",
                      devices.size(), " chunks along dimension ", dim, ", but a tensor of shape ",
                      tensors[0].sizes(), " gives ", answer.replicas, " and one of shape ", tensor.sizes(),
                      " gives ", count, "; give all the same size there");
    for (size_t i = 0; i < chunks.size(); ++i) chunks[i] = chunks[i].to(devices[i], /*non_blocking=*/true);
    answer.chunks.push_back(std::move(chunks));
  }
  if (tensors.empty()) answer.replicas = static_cast<int>(devices.size());
  return answer;
}

void throw_different(size_t replica, const std::string& its, const std::string& first) {
  TORCH_CHECK(false, "DataParallel can't gather the outputs: replica ", replica, " returned ", its,
              " where replica 0 returned ", first);
}

at::Tensor gather_tensors(std::vector<at::Tensor> tensors, const GatherPlace& place) {
  bool scalars = place.dim == 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].defined() != tensors[0].defined()) {
      throw_different(i, tensors[i].defined() ? "a tensor" : "none", tensors[i].defined() ? "none" : "one");
    }
    if (!tensors[i].defined()) continue;
    scalars &= tensors[i].dim() == 0;
    tensors[i] = tensors[i].to(place.device);
  }
  if (!tensors[0].defined()) return {};
  if (!scalars) return tensors.size() == 1 ? tensors[0] : at::cat(tensors, place.dim);
  TORCH_WARN_ONCE(
      "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze and "
      "return a vector.");
  return at::stack(tensors);
}

c10::IValue gather_ivalues(const std::vector<const c10::IValue*>& values, const GatherPlace& place) {
  const c10::IValue& first = *values[0];
  const auto check = [&](auto&& trait, const char* what) {
    for (size_t i = 1; i < values.size(); ++i) {
      if (trait(*values[i]) == trait(first)) continue;
      throw_different(i, what + std::to_string(trait(*values[i])), what + std::to_string(trait(first)));
    }
  };
  // Gathers the part that get(value) leads to.
  const auto gather_part = [&](auto&& get) {
    std::vector<c10::IValue> inner;
    for (const auto* value : values) inner.push_back(get(*value));
    std::vector<const c10::IValue*> pointers;
    for (const auto& value : inner) pointers.push_back(&value);
    return gather_ivalues(pointers, place);
  };
  for (size_t i = 1; i < values.size(); ++i) {
    if (values[i]->tagKind() != first.tagKind())
      throw_different(i, "a " + values[i]->tagKind(), "a " + first.tagKind());
  }
  if (first.isTensor()) {
    std::vector<at::Tensor> tensors;
    for (const auto* value : values) tensors.push_back(value->toTensor());
    return gather_tensors(std::move(tensors), place);
  }
  if (first.isTuple()) {
    const auto size = [](const c10::IValue& value) { return value.toTupleRef().elements().size(); };
    check(size, "a tuple of size ");
    std::vector<c10::IValue> elements;
    for (size_t k = 0; k < size(first); ++k) {
      elements.push_back(
          gather_part([k](const c10::IValue& value) { return value.toTupleRef().elements()[k]; }));
    }
    const auto type = first.toTupleRef().type<c10::TupleType>();
    return type->schema() ? c10::ivalue::Tuple::createNamed(std::move(elements), type)
                          : c10::ivalue::Tuple::create(std::move(elements));
  }
  if (first.isList()) {
    check([](const c10::IValue& value) { return value.toListRef().size(); }, "a list of size ");
    auto list = first.toList().copy();
    for (size_t k = 0; k < list.size(); ++k) {
      list.set(k, gather_part([k](const c10::IValue& value) { return value.toList().get(k); }));
    }
    return list;
  }
  if (first.isGenericDict()) {
    check([](const c10::IValue& value) { return value.toGenericDict().size(); }, "a dict of size ");
    auto dict = first.toGenericDict().copy();
    for (const auto& item : dict) {
      item.setValue(
          gather_part([&](const c10::IValue& value) { return value.toGenericDict().at(item.key()); }));
    }
    return dict;
  }
  TORCH_CHECK(!first.isObject(), "DataParallel can't gather objects of TorchScript classes, such as the ",
              first.type()->repr_str(),
              " that the replicas returned; return its tensors in a tuple or a dict");
  for (size_t i = 1; i < values.size(); ++i) {
    TORCH_CHECK(
        *values[i] == first, "replica ", i, " returned ", *values[i], " where replica 0 returned ", first,
        ", for a part of the output that is not a tensor; return it as a tensor to have that of each ",
        "replica");
  }
  return first;
}

}  // namespace lockstep::internal
