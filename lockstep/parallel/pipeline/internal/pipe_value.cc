#include <tuple>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <lockstep/base/tensor_tree.h>
#include <lockstep/parallel/pipeline/internal/pipe_value.h>

namespace lockstep::pipeline::internal {
namespace {

using at::Tensor;
using torch::nn::AnyValue;

template <class T, class Visit>
bool visit_as(AnyValue& value, const Visit& visit) {
  T* known = value.try_get<T>();
  if (known != nullptr) for_each_owned_tensor(*known, visit);
  return known != nullptr;
}

template <class Visit>
void visit_tensors_of(AnyValue& value, const Visit& visit) {
  const bool known = visit_as<Tensor>(value, visit) || visit_as<std::vector<Tensor>>(value, visit) ||
                     visit_as<std::pair<Tensor, Tensor>>(value, visit) ||
                     visit_as<std::tuple<Tensor, Tensor>>(value, visit) ||
                     visit_as<std::tuple<Tensor, Tensor, Tensor>>(value, visit) ||
                     visit_as<std::tuple<Tensor, Tensor, Tensor, Tensor>>(value, visit) ||
                     visit_as<std::tuple<Tensor, std::tuple<Tensor, Tensor>>>(value, visit);
  TORCH_CHECK_TYPE(
      known, "a layer returned a ", c10::demangle(value.type_info().name()),
      ", whose tensors can't be found. Between partitions go tensors, pairs, tuples of up to four, and "
      "vectors of tensors, and what torch::nn::LSTM returns: cut at another layer, or return one of these");
}

}  // namespace

std::vector<Tensor> tensors_of(const AnyValue& value) {
  std::vector<Tensor> tensors;
  // AnyValue shows what it has to those alone who may change it.
  visit_tensors_of(const_cast<AnyValue&>(value), [&](Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

void set_tensors(AnyValue& value, const std::vector<Tensor>& tensors) {
  auto next = tensors.begin();
  visit_tensors_of(value, [&](Tensor& tensor) { tensor = *next++; });
}

}  // namespace lockstep::pipeline::internal
