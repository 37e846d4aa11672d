#pragma once

#include <concepts>
#include <optional>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/base/tensor_tree.h>

namespace lockstep::data {

/// How to pin a value of type T as a whole. Specialise it for a batch type of your own, with
/// `static T pin(T value)`, or give the type a method `T pin_memory() const`, as in Python.
template <class T>
struct PinMemory;

namespace internal {

/// A copy in page-locked memory. Throws c10::Error where there is no accelerator.
at::Tensor pinned(const at::Tensor& tensor);

template <class T>
void pin(T& value) {
  if constexpr (std::is_const_v<T>) {
    return;
  } else if constexpr (requires { PinMemory<T>::pin(std::move(value)); }) {
    value = PinMemory<T>::pin(std::move(value));
  } else if constexpr (std::derived_from<T, at::Tensor>) {
    if (value.defined()) value = internal::pinned(value);
  } else if constexpr (requires { value.pin_memory(); }) {
    value = value.pin_memory();
  } else {
    lockstep::internal::for_each_part</*kThrough=*/false>(value, [](auto& part) { internal::pin(part); });
  }
}

/// The device whose driver shall pin: the calling thread's current one. Nothing where there is no
/// accelerator, after a warning, once per process.
std::optional<c10::Device> device_for_pinning();

/// Makes a device the calling thread's current one while it lives: a worker must not wake up device 0 in a
/// process that computes on another.
class PinningScope {
 public:
  explicit PinningScope(c10::Device device);
  ~PinningScope();
  PinningScope(const PinningScope&) = delete;
  PinningScope& operator=(const PinningScope&) = delete;

 private:
  c10::Device before_;
};

}  // namespace internal

/// The value with its tensors in page-locked memory: of at::Tensor, Example, pairs, tuples, arrays,
/// optionals, vectors and maps of such, and types with a visit_tensors() (lockstep/base/tensor_tree.h); what
/// lies behind pointers, and what is unknown, stays as it is. torch/utils/data/_utils/pin_memory.py.
/// Page-locked for the accelerator that this process uses; throws c10::Error where there is none.
/// Thread-safe.
template <class T>
T pin_memory(T value) {
  internal::pin(value);
  return value;
}

}  // namespace lockstep::data
