#include <arrow/extension_type.h>

#include <c10/util/Exception.h>

#include <lockstep/parquet/internal/arrow_types.h>

namespace lockstep::parquet::internal {
namespace {

using arrow::Type;

const arrow::DataType& storage_type(const arrow::DataType& type) {
  return type.id() == Type::EXTENSION ? *as<arrow::ExtensionType>(type).storage_type() : type;
}

/// The type of the numbers within is_dense() types; bytes for those of a fixed number.
const arrow::DataType& innermost(const arrow::DataType& given) {
  const arrow::DataType& type = storage_type(given);
  return type.id() == Type::FIXED_SIZE_LIST ? innermost(*as<arrow::FixedSizeListType>(type).value_type())
                                            : type;
}

}  // namespace

std::optional<at::ScalarType> number_type(const arrow::DataType& type) {
  switch (type.id()) {
    case Type::BOOL:
      return at::kBool;
    case Type::INT8:
      return at::kChar;
    case Type::UINT8:
      return at::kByte;
    case Type::INT16:
      return at::kShort;
    case Type::INT32:
    case Type::DATE32:
    case Type::TIME32:
      return at::kInt;
    case Type::INT64:
    case Type::DATE64:
    case Type::TIME64:
    case Type::TIMESTAMP:
    case Type::DURATION:
      return at::kLong;
    // Torch computes nothing with wider unsigned integers, so they become the next wider signed ones.
    case Type::UINT16:
      return at::kInt;
    case Type::UINT32:
      return at::kLong;
    case Type::UINT64:
      return at::kLong;
    case Type::HALF_FLOAT:
      return at::kHalf;
    case Type::FLOAT:
      return at::kFloat;
    case Type::DOUBLE:
      return at::kDouble;
    default:
      return std::nullopt;
  }
}

bool holds_strings(Type::type id) {
  return id == Type::STRING || id == Type::LARGE_STRING || id == Type::STRING_VIEW || id == Type::BINARY ||
         id == Type::LARGE_BINARY || id == Type::BINARY_VIEW;
}

bool is_dense(const arrow::DataType& given) {
  const arrow::DataType& type = storage_type(given);
  if (type.id() == Type::FIXED_SIZE_LIST) return is_dense(*as<arrow::FixedSizeListType>(type).value_type());
  return type.id() == Type::FIXED_SIZE_BINARY || number_type(type).has_value();
}

std::optional<std::string> why_unsupported(const arrow::DataType& given) {
  const arrow::DataType& type = storage_type(given);
  if (is_dense(type) || holds_strings(type.id())) return std::nullopt;
  switch (type.id()) {
    case Type::DICTIONARY:
      return why_unsupported(*as<arrow::DictionaryType>(type).value_type());
    case Type::LIST:
    case Type::LARGE_LIST: {
      const auto& element = *as<arrow::BaseListType>(type).value_type();
      if (is_dense(element)) return std::nullopt;
      return "lists of " + element.ToString() + " fit into no tensor; flatten them when writing";
    }
    case Type::DECIMAL32:
    case Type::DECIMAL64:
    case Type::DECIMAL128:
    case Type::DECIMAL256:
      return std::string("torch has no decimal numbers; cast them to float64 (or scaled int64) when writing");
    case Type::STRUCT:
      return std::string("nested columns fit into no tensor; write its fields as columns");
    case Type::NA:
      return std::string("it has no type, for all its values are null");
    default:
      return std::string("torch has nothing like it");
  }
}

void check_fill_value(const arrow::DataType& given, const FillValue& fill, const std::string& where) {
  const arrow::DataType* type = &storage_type(given);
  if (type->id() == Type::DICTIONARY) type = as<arrow::DictionaryType>(*type).value_type().get();
  if (type->id() == Type::LIST || type->id() == Type::LARGE_LIST) {
    type = as<arrow::BaseListType>(*type).value_type().get();
  }
  bool suits = false;
  if (holds_strings(type->id())) {
    suits = std::holds_alternative<std::string>(fill);
  } else if (const auto number = number_type(innermost(*type))) {
    suits = with_element_type(*number, [&](auto zero) { return fill_as<decltype(zero)>(fill).has_value(); });
  }
  TORCH_CHECK_VALUE(suits, ".fill_nulls: the value for ", where, " does not fit its type, ",
                    given.ToString());
}

ColumnSize column_size(const arrow::DataType& given, Nulls nulls) {
  const arrow::DataType& type = storage_type(given);
  const int64_t mask = nulls == Nulls::kMask ? 1 : 0;
  constexpr auto kOffset = static_cast<int64_t>(sizeof(int64_t));
  if (holds_strings(type.id())) return {kOffset + mask, 0, true};
  switch (type.id()) {
    case Type::DICTIONARY:
      return column_size(*as<arrow::DictionaryType>(type).value_type(), nulls);
    case Type::LIST:
    case Type::LARGE_LIST: {
      const ColumnSize element = column_size(*as<arrow::BaseListType>(type).value_type(), nulls);
      return {kOffset + mask, element.per_row, false};
    }
    case Type::FIXED_SIZE_LIST: {
      const auto& list = as<arrow::FixedSizeListType>(type);
      // With a mask for rows and one for numbers.
      return {column_size(*list.value_type(), nulls).per_row * list.list_size() + mask, 0, false};
    }
    case Type::FIXED_SIZE_BINARY:
      return {as<arrow::FixedSizeBinaryType>(type).byte_width() + mask, 0, false};
    default:
      break;
  }
  const auto number = number_type(type);
  return {number ? static_cast<int64_t>(c10::elementSize(*number)) + mask : 0, 0, false};
}

}  // namespace lockstep::parquet::internal
