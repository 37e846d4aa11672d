#pragma once

#include <arrow/type.h>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>

#include <c10/core/ScalarType.h>
#include <c10/util/Half.h>

#include <lockstep/parquet/nulls.h>

/// Which of Arrow's types a Column can hold, and as what.
namespace lockstep::parquet::internal {

using data::FillValue;
using data::Nulls;

/// Why no Column can hold this type; nothing if one can.
std::optional<std::string> why_unsupported(const arrow::DataType& type);

/// Throws c10::ValueError when the fill value does not suit the type. `where` names the column.
void check_fill_value(const arrow::DataType& type, const FillValue& fill, const std::string& where);

/// Memory that a Column of this type takes.
struct ColumnSize {
  int64_t per_row = 0;      // bytes for each row
  int64_t per_element = 0;  // bytes for each element of a list, without those of fixed size
  bool strings = false;     // and the strings' own bytes
};
ColumnSize column_size(const arrow::DataType& type, Nulls nulls);

/// The type of the tensor that numbers of this type become; nothing when it is not one of numbers.
std::optional<at::ScalarType> number_type(const arrow::DataType& type);

/// Strings, or bytes of any number.
bool holds_strings(arrow::Type::type id);

/// Whether elements of this type have one shape: numbers, fixed-size lists of such, bytes of a fixed number.
bool is_dense(const arrow::DataType& type);

/// A type or an array as what it is known to be.
template <class Derived, class Base>
const Derived& as(const Base& base) {
  return static_cast<const Derived&>(base);  // NOLINT(cppcoreguidelines-pro-type-static-cast-downcast)
}

/// A fill value as an element of a tensor; nothing when it doesn't fit.
template <class T>
std::optional<T> fill_as(const FillValue& fill) {
  return std::visit(
      [](const auto& value) -> std::optional<T> {
        using Value = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, std::string> ||
                      std::is_same_v<T, bool> != std::is_same_v<Value, bool>) {
          return std::nullopt;
        } else if constexpr (std::is_same_v<T, bool> || !std::is_integral_v<T>) {
          return static_cast<T>(value);
        } else if constexpr (std::is_same_v<Value, int64_t>) {
          const auto converted = static_cast<T>(value);
          return static_cast<int64_t>(converted) == value ? std::optional(converted) : std::nullopt;
        } else {
          return std::nullopt;  // no fraction in a column of whole numbers
        }
      },
      fill);
}

/// Calls function with a zero of the tensor's element type.
template <class Function>
auto with_element_type(at::ScalarType dtype, Function function) {
  switch (dtype) {
    case at::kBool:
      return function(bool());
    case at::kByte:
      return function(uint8_t());
    case at::kChar:
      return function(int8_t());
    case at::kShort:
      return function(int16_t());
    case at::kInt:
      return function(int32_t());
    case at::kLong:
      return function(int64_t());
    case at::kHalf:
      return function(c10::Half());
    case at::kFloat:
      return function(float());
    default:
      return function(double());
  }
}

}  // namespace lockstep::parquet::internal
