#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

/// The standard library's types as objects for all_gather_object() and its kin, and back:
///
///     using Counters = std::map<std::string, c10::IValue>;
///     c10::IValue object = to_object(Counters{{"loss", 0.01}, {"num_samples", rank}});
///     auto counters = from_object<std::map<std::string, double>>(object);
///
/// Known are bool, integers, floating point, strings, at::Tensor, c10::Device, c10::IValue itself, and of
/// known types optional (None when empty), vector and array (list), map and unordered_map (dict), pair and
/// tuple (tuple). For a type of your own, specialise ObjectConversion. All functions are thread-safe.
namespace lockstep {

/// static c10::IValue to(const T&) and static T from(const c10::IValue&).
template <class T>
struct ObjectConversion;

/// The object that stands for `value`. Throws c10::ValueError for an unsigned number beyond 63 bits.
template <class T>
c10::IValue to_object(const T& value) {
  return ObjectConversion<T>::to(value);
}
inline c10::IValue to_object(const char* value) {
  return c10::IValue(std::string(value));
}

/// The value for which `object` stands. Takes lists for tuples and tuples for lists, as both are one to the
/// sender, and integers for floating point. Throws c10::ValueError that says what was wanted and what is
/// there for any other kind, for numbers out of range, and for pairs, tuples and arrays of the wrong length.
template <class T>
T from_object(const c10::IValue& object) {
  return ObjectConversion<T>::from(object);
}

namespace serialization {

[[noreturn]] void throw_wrong_object(std::string_view wanted, const c10::IValue& object);
/// An empty list or dict of elements of any type.
c10::impl::GenericList make_object_list(size_t capacity);
c10::impl::GenericDict make_object_dict();
/// The elements of a list or tuple; with `size`, so many.
c10::ArrayRef<c10::IValue> elements_of(const c10::IValue& object, std::optional<size_t> size = {});

template <class Map>
struct MapConversion {
  static c10::IValue to(const Map& values) {
    auto dict = make_object_dict();
    for (const auto& [key, value] : values) dict.insert(to_object(key), to_object(value));
    return dict;
  }
  static Map from(const c10::IValue& object) {
    if (!object.isGenericDict()) throw_wrong_object("a dict", object);
    Map values;
    for (const auto& item : object.toGenericDict()) {
      values.emplace(from_object<typename Map::key_type>(item.key()),
                     from_object<typename Map::mapped_type>(item.value()));
    }
    return values;
  }
};

}  // namespace serialization

template <>
struct ObjectConversion<c10::IValue> {
  static c10::IValue to(const c10::IValue& value) { return value; }
  static c10::IValue from(const c10::IValue& object) { return object; }
};

template <>
struct ObjectConversion<bool> {
  static c10::IValue to(bool value) { return value; }
  static bool from(const c10::IValue& object) {
    if (!object.isBool()) serialization::throw_wrong_object("a bool", object);
    return object.toBool();
  }
};

template <std::integral T>
struct ObjectConversion<T> {
  static c10::IValue to(T value) {
    TORCH_CHECK_VALUE(std::in_range<int64_t>(value), "to_object: ", value,
                      " does not fit into 64 bits with sign");
    return static_cast<int64_t>(value);
  }
  static T from(const c10::IValue& object) {
    if (!object.isInt()) serialization::throw_wrong_object("an integer", object);
    TORCH_CHECK_VALUE(std::in_range<T>(object.toInt()), "from_object: ", object.toInt(), " is outside ",
                      +std::numeric_limits<T>::min(), " to ", +std::numeric_limits<T>::max());
    return static_cast<T>(object.toInt());
  }
};

template <std::floating_point T>
struct ObjectConversion<T> {
  static c10::IValue to(T value) { return static_cast<double>(value); }
  static T from(const c10::IValue& object) {
    if (object.isInt()) return static_cast<T>(object.toInt());
    if (!object.isDouble()) serialization::throw_wrong_object("a number", object);
    return static_cast<T>(object.toDouble());
  }
};

template <>
struct ObjectConversion<std::string> {
  static c10::IValue to(const std::string& value) { return value; }
  static std::string from(const c10::IValue& object) {
    if (!object.isString()) serialization::throw_wrong_object("a string", object);
    return object.toStringRef();
  }
};

template <>
struct ObjectConversion<std::string_view> {  // only there: nothing would own what comes back
  static c10::IValue to(std::string_view value) { return std::string(value); }
};

template <>
struct ObjectConversion<at::Tensor> {
  static c10::IValue to(const at::Tensor& value) { return value; }
  static at::Tensor from(const c10::IValue& object) {
    if (!object.isTensor()) serialization::throw_wrong_object("a tensor", object);
    return object.toTensor();
  }
};

template <>
struct ObjectConversion<c10::Device> {
  static c10::IValue to(const c10::Device& value) { return value; }
  static c10::Device from(const c10::IValue& object) {
    if (!object.isDevice()) serialization::throw_wrong_object("a device", object);
    return object.toDevice();
  }
};

template <class T>
struct ObjectConversion<std::optional<T>> {
  static c10::IValue to(const std::optional<T>& value) { return value ? to_object(*value) : c10::IValue(); }
  static std::optional<T> from(const c10::IValue& object) {
    if (object.isNone()) return {};
    return from_object<T>(object);
  }
};

template <class T>
struct ObjectConversion<std::vector<T>> {
  static c10::IValue to(const std::vector<T>& values) {
    auto list = serialization::make_object_list(values.size());
    for (const T& value : values) list.push_back(to_object<T>(value));
    return list;
  }
  static std::vector<T> from(const c10::IValue& object) {
    std::vector<T> values;
    for (const c10::IValue& element : serialization::elements_of(object))
      values.push_back(from_object<T>(element));
    return values;
  }
};

template <class T, size_t kSize>
struct ObjectConversion<std::array<T, kSize>> {
  static c10::IValue to(const std::array<T, kSize>& values) {
    return to_object(std::vector<T>(values.begin(), values.end()));
  }
  static std::array<T, kSize> from(const c10::IValue& object) {
    const auto elements = serialization::elements_of(object, kSize);
    std::array<T, kSize> values;
    for (size_t i = 0; i < kSize; ++i) values[i] = from_object<T>(elements[i]);
    return values;
  }
};

template <class K, class V, class... Rest>
struct ObjectConversion<std::map<K, V, Rest...>> : serialization::MapConversion<std::map<K, V, Rest...>> {};
template <class K, class V, class... Rest>
struct ObjectConversion<std::unordered_map<K, V, Rest...>>
    : serialization::MapConversion<std::unordered_map<K, V, Rest...>> {};

template <class... Ts>
struct ObjectConversion<std::tuple<Ts...>> {
  static c10::IValue to(const std::tuple<Ts...>& values) {
    return std::apply(
        [](const Ts&... each) {
          return c10::ivalue::Tuple::create(std::vector<c10::IValue>{to_object<Ts>(each)...});
        },
        values);
  }
  static std::tuple<Ts...> from(const c10::IValue& object) {
    const auto elements = serialization::elements_of(object, sizeof...(Ts));
    return [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
      return std::tuple<Ts...>{from_object<Ts>(elements[kIndices])...};
    }
    (std::index_sequence_for<Ts...>());
  }
};

template <class A, class B>
struct ObjectConversion<std::pair<A, B>> {
  static c10::IValue to(const std::pair<A, B>& value) { return to_object(std::tuple<A, B>(value)); }
  static std::pair<A, B> from(const c10::IValue& object) {
    auto [first, second] = from_object<std::tuple<A, B>>(object);
    return {std::move(first), std::move(second)};
  }
};

}  // namespace lockstep
