#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <lockstep/parallel/data_parallel/internal/scatter_gather.h>

namespace lockstep::data_parallel::internal {

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
  for (size_t i = 1; i < values.size(); ++i) {
    if (values[i]->tagKind() != first.tagKind())
      throw_different(i, "a " + values[i]->tagKind(), "a " + first.tagKind());
  }
  if (first.isTensor()) {
    std::vector<at::Tensor> tensors;
    for (const auto* value : values) tensors.push_back(value->toTensor());
    return gather_tensors(std::move(tensors), place);
  }
  const char* container = first.isTuple()         ? "a tuple of size "
                          : first.isList()        ? "a list of size "
                          : first.isGenericDict() ? "a dict of size "
                                                  : nullptr;
  if (container != nullptr) {
    std::vector<std::vector<c10::IValue>> parts;  // of each replica, in the order of the first's
    for (const auto* value : values) {
      parts.push_back(lockstep::internal::parts_of(*value));
      const size_t size = parts.back().size();
      if (size != parts[0].size()) {
        throw_different(parts.size() - 1, container + std::to_string(size),
                        container + std::to_string(parts[0].size()));
      }
      if (!first.isGenericDict()) continue;
      auto part = parts.back().begin();
      for (const auto& item : first.toGenericDict()) *part++ = value->toGenericDict().at(item.key());
    }
    std::vector<c10::IValue> gathered;
    for (size_t k = 0; k < parts[0].size(); ++k) {
      std::vector<const c10::IValue*> same;
      for (const auto& of_replica : parts) same.push_back(&of_replica[k]);
      gathered.push_back(gather_ivalues(same, place));
    }
    return lockstep::internal::with_parts(first, std::move(gathered));
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

}  // namespace lockstep::data_parallel::internal
