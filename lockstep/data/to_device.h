#pragma once

#include <concepts>
#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace lockstep::data {
namespace internal {

/// Stands for a visitor where only the existence of visit_tensors() is asked.
struct AnyTensorVisitor {
  template <class Part>
  void operator()(Part&& /*unused*/) const {}
};
template <class T>
concept SaysItsTensors = requires(T& value, const AnyTensorVisitor& visit) {
  value.visit_tensors(visit);
};
template <class T>
concept HasTensorsSaid = requires(T& value, const AnyTensorVisitor& visit) {
  visit_tensors(value, visit);
};

template <class T>
inline constexpr bool kIsOptional = false;
template <class T>
inline constexpr bool kIsOptional<std::optional<T>> = true;
template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

/// Calls visit(at::Tensor&) for each defined tensor of a batch: of what the default collate function makes,
/// and of types with a visit_tensors() (lockstep/base/tensor_tree.h).
template <class T, class Visit>
void for_each_batch_tensor(T& value, const Visit& visit) {
  if constexpr (std::derived_from<T, at::Tensor>) {
    if (value.defined()) visit(value);
  } else if constexpr (SaysItsTensors<T>) {
    value.visit_tensors([&](auto& part) { for_each_batch_tensor(part, visit); });
  } else if constexpr (HasTensorsSaid<T>) {
    visit_tensors(value, [&](auto& part) { for_each_batch_tensor(part, visit); });
  } else if constexpr (kIsOptional<T>) {
    if (value) for_each_batch_tensor(*value, visit);
  } else if constexpr (requires { typename T::mapped_type; }) {
    for (auto& [key, mapped] : value) for_each_batch_tensor(mapped, visit);
  } else if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, std::vector<bool>>) {
    return;
  } else if constexpr (std::ranges::input_range<T>) {
    for (auto& element : value) for_each_batch_tensor(element, visit);
  } else if constexpr (TupleLike<T>) {
    std::apply([&](auto&... part) { (for_each_batch_tensor(part, visit), ...); }, value);
  } else {
    static_assert(std::is_trivially_copyable_v<T>,
                  "no tensors can be found in this type of batch; give it a visit_tensors() (see "
                  "lockstep/base/tensor_tree.h)");
  }
}

}  // namespace internal

/// The value with its tensors on `device`: at::Tensor, Example, and pairs, tuples, arrays, optionals, vectors
/// and maps of such, and types with a visit_tensors(). `non_blocking`: copies from pinned memory are only
/// enqueued on the device's current stream, and the program goes on. Thread-safe.
template <class T>
T to_device(T value, c10::Device device, bool non_blocking = false) {
  internal::for_each_batch_tensor(
      value, [&](at::Tensor& tensor) { tensor = tensor.to(tensor.options().device(device), non_blocking); });
  return value;
}

}  // namespace lockstep::data
