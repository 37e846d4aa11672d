#pragma once

#include <concepts>
#include <string>
#include <type_traits>
#include <vector>

#include <nlohmann/json.hpp>

namespace lockstep {

/// value.get<T>(), which makes an integer of any number, and anything at all of one that no integer can be. Throws
/// nlohmann::json::type_error then, too: where T is an integer, or a vector of them, for a number with a fraction or an exponent.
template <class T>
T json_value(const nlohmann::json& value) {
  const auto check = [](const nlohmann::json& number) {
    if (number.is_number_float()) (void)number.get_ref<const std::string&>();  // throws: it is no string
  };
  if constexpr (std::integral<T> && !std::same_as<T, bool>) check(value);
  if constexpr (std::same_as<T, std::vector<int>>) {
    for (const nlohmann::json& element : value) check(element);
  }
  return value.get<T>();
}

}  // namespace lockstep
