#pragma once

#include <array>
#include <concepts>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/data/example.h>

namespace lockstep::data {

namespace internal {
/// A copy in page-locked memory. Throws c10::Error where there is no accelerator.
at::Tensor pinned(const at::Tensor& tensor);
}  // namespace internal

/// What pin_memory() does with a value of type T: nothing, unless it is or holds tensors. Specialise it for a
/// batch type of your own, or give the type a method `T pin_memory() const`, as in Python.
template <class T>
struct PinMemory {
  static T pin(T value) {
    if constexpr (std::derived_from<T, at::Tensor>) {
      return internal::pinned(value);
    } else if constexpr (requires { value.pin_memory(); }) {
      return value.pin_memory();
    } else {
      return value;
    }
  }
};

/// The value with its tensors in page-locked memory: of at::Tensor, Example, and pairs, tuples, arrays,
/// optionals, vectors and maps of such. torch/utils/data/_utils/pin_memory.py. Page-locked for the
/// accelerator that this process uses; throws c10::Error where there is none. Thread-safe.
template <class T>
T pin_memory(T value) {
  return PinMemory<T>::pin(std::move(value));
}

template <>
struct PinMemory<Example> {
  static Example pin(const Example& value) {
    return {value.data.defined() ? internal::pinned(value.data) : value.data,
            value.target.defined() ? internal::pinned(value.target) : value.target};
  }
};
template <class A, class B>
struct PinMemory<std::pair<A, B>> {
  static std::pair<A, B> pin(std::pair<A, B> value) {
    return {pin_memory(std::move(value.first)), pin_memory(std::move(value.second))};
  }
};
template <class... Ts>
struct PinMemory<std::tuple<Ts...>> {
  static std::tuple<Ts...> pin(std::tuple<Ts...> value) {
    return std::apply([](auto&... each) { return std::tuple<Ts...>{pin_memory(std::move(each))...}; }, value);
  }
};
template <class T>
struct PinMemory<std::optional<T>> {
  static std::optional<T> pin(std::optional<T> value) {
    if (value) value = pin_memory(std::move(*value));
    return value;
  }
};

namespace internal {

template <class Range>
struct PinEach {
  static Range pin(Range values) {
    for (auto& value : values) value = pin_memory(std::move(value));
    return values;
  }
};
template <class Map>
struct PinMapped {
  static Map pin(Map values) {
    for (auto& [key, value] : values) value = pin_memory(std::move(value));
    return values;
  }
};

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

template <class T>
struct PinMemory<std::vector<T>> : internal::PinEach<std::vector<T>> {};
template <>
struct PinMemory<std::vector<bool>> {
  static std::vector<bool> pin(std::vector<bool> values) { return values; }
};
template <class T, size_t kSize>
struct PinMemory<std::array<T, kSize>> : internal::PinEach<std::array<T, kSize>> {};
template <class K, class V, class... Rest>
struct PinMemory<std::map<K, V, Rest...>> : internal::PinMapped<std::map<K, V, Rest...>> {};
template <class K, class V, class... Rest>
struct PinMemory<std::unordered_map<K, V, Rest...>> : internal::PinMapped<std::unordered_map<K, V, Rest...>> {
};

}  // namespace lockstep::data
