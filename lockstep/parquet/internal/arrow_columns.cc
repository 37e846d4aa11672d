#include <algorithm>
#include <arrow/array.h>
#include <arrow/array/util.h>
#include <arrow/chunked_array.h>
#include <arrow/extension_type.h>
#include <arrow/util/bit_util.h>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <lockstep/parquet/internal/arrow_columns.h>
#include <lockstep/parquet/internal/arrow_types.h>

namespace lockstep::parquet::internal {
namespace {

using arrow::Type;

std::shared_ptr<arrow::Array> storage(std::shared_ptr<arrow::Array> array) {
  if (array->type_id() != Type::EXTENSION) return array;
  return as<arrow::ExtensionArray>(*array).storage();
}

/// Elements of a type with is_dense(): tensors of their shape, and which of them are there.
struct Dense {
  at::Tensor values;
  std::vector<bool> valid;          // of rows; empty: all
  std::vector<bool> element_valid;  // of all numbers within rows of fixed-size lists; empty: all
  int64_t null_elements = 0;        // false ones of element_valid, outside of null rows
};

/// Which of the array's elements are not null; empty: all are there.
std::vector<bool> validity_of(const arrow::Array& array) {
  std::vector<bool> valid;
  if (array.null_count() == 0) return valid;
  valid.resize(static_cast<size_t>(array.length()));
  for (int64_t i = 0; i < array.length(); ++i) valid[static_cast<size_t>(i)] = array.IsValid(i);
  return valid;
}

at::Tensor mask_of(const std::vector<bool>& valid, at::IntArrayRef sizes) {
  at::Tensor mask = at::empty(sizes, at::kBool);
  bool* out = mask.mutable_data_ptr<bool>();
  if (valid.empty()) {
    std::fill_n(out, mask.numel(), true);
  } else {
    std::copy(valid.begin(), valid.end(), out);
  }
  return mask;
}

/// A tensor over memory of Arrow's, which it keeps alive. Nothing else writes there: it was decoded for us.
at::Tensor wrap(const std::shared_ptr<arrow::Buffer>& buffer, int64_t byte_offset, at::IntArrayRef sizes,
                at::ScalarType dtype) {
  if (c10::multiply_integers(sizes) == 0) return at::empty(sizes, dtype);
  void* data =
      const_cast<uint8_t*>(buffer->data()) + byte_offset;  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  return at::from_blob(
      data, sizes, [buffer](void* /*data*/) {}, at::TensorOptions(dtype));
}

template <class Wide, class Narrow>
at::Tensor widened(const arrow::Array& array, at::ScalarType dtype) {
  at::Tensor result = at::empty({array.length()}, dtype);
  const auto* source = array.data()->GetValues<Narrow>(1);
  std::copy_n(source, array.length(), result.mutable_data_ptr<Wide>());
  return result;
}

at::Tensor number_values(const arrow::Array& array, at::ScalarType dtype, const std::string& where) {
  const int64_t length = array.length();
  const auto& buffer = array.data()->buffers[1];
  if (length == 0) return at::empty({0}, dtype);
  switch (array.type_id()) {
    case Type::BOOL: {
      at::Tensor result = at::empty({length}, at::kBool);
      bool* out = result.mutable_data_ptr<bool>();
      for (int64_t i = 0; i < length; ++i) {
        out[i] = arrow::bit_util::GetBit(buffer->data(), array.offset() + i);
      }
      return result;
    }
    case Type::UINT16:
      return widened<int32_t, uint16_t>(array, dtype);
    case Type::UINT32:
      return widened<int64_t, uint32_t>(array, dtype);
    case Type::UINT64: {
      const auto* values = array.data()->GetValues<uint64_t>(1);
      for (int64_t i = 0; i < length; ++i) {
        TORCH_CHECK(array.IsNull(i) || values[i] <= uint64_t{std::numeric_limits<int64_t>::max()}, where,
                    " holds ", values[i],
                    ", and torch's largest integer is 2^63 - 1; write the column as "
                    "double, or leave it out with .columns");
      }
      break;
    }
    default:
      break;
  }
  const auto width = static_cast<int64_t>(c10::elementSize(dtype));
  return wrap(buffer, array.offset() * width, {length}, dtype);
}

Dense to_dense(const arrow::Array& array, const std::string& where) {
  Dense result;
  result.valid = validity_of(array);
  if (const auto dtype = number_type(*array.type())) {
    result.values = number_values(array, *dtype, where);
    return result;
  }
  if (array.type_id() == Type::FIXED_SIZE_BINARY) {
    const int64_t width = as<arrow::FixedSizeBinaryType>(*array.type()).byte_width();
    result.values =
        wrap(array.data()->buffers[1], array.offset() * width, {array.length(), width}, at::kByte);
    return result;
  }
  const auto& lists = as<arrow::FixedSizeListArray>(array);
  const int64_t size = as<arrow::FixedSizeListType>(*array.type()).list_size();
  const auto elements = storage(lists.values()->Slice(lists.value_offset(0), lists.length() * size));
  Dense inner = to_dense(*elements, where);
  auto sizes = inner.values.sizes().vec();
  sizes[0] = size;
  sizes.insert(sizes.begin(), array.length());
  const int64_t numbers_per_row = c10::multiply_integers(sizes.begin() + 1, sizes.end());
  result.values = inner.values.reshape(sizes);
  if (inner.valid.empty() && inner.element_valid.empty() && result.valid.empty()) return result;
  const int64_t numbers_per_element = size > 0 ? numbers_per_row / size : 0;
  for (int64_t row = 0; row < array.length(); ++row) {
    const bool row_valid = result.valid.empty() || result.valid[static_cast<size_t>(row)];
    for (int64_t i = 0; i < numbers_per_row; ++i) {
      const int64_t number = row * numbers_per_row + i;
      const bool element =
          (inner.valid.empty() || inner.valid[static_cast<size_t>(number / numbers_per_element)]) &&
          (inner.element_valid.empty() || inner.element_valid[static_cast<size_t>(number)]);
      result.element_valid.push_back(row_valid && element);
      if (row_valid && !element) ++result.null_elements;
    }
  }
  return result;
}

/// Replaces what stands where numbers are null, in memory of their own.
void fill(at::Tensor& values, const std::vector<bool>& valid, const NullPolicy& policy) {
  if (valid.empty()) return;
  at::Tensor own = at::empty(values.sizes(), values.options());
  std::memcpy(own.mutable_data_ptr(), values.const_data_ptr(), values.nbytes());
  const int64_t per_flag =
      static_cast<int64_t>(valid.size()) > 0 ? own.numel() / static_cast<int64_t>(valid.size()) : 0;
  with_element_type(own.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T value = policy.fill ? fill_as<T>(*policy.fill).value_or(zero) : zero;
    T* out = own.mutable_data_ptr<T>();
    for (size_t i = 0; i < valid.size(); ++i) {
      if (!valid[i]) std::fill_n(out + static_cast<int64_t>(i) * per_flag, per_flag, value);
    }
  });
  values = std::move(own);
}

/// Fills and masks nulls of dense elements, which refuse_nulls() has allowed.
void settle(Dense& dense, const NullPolicy& policy) {
  fill(dense.values, dense.element_valid.empty() ? dense.valid : dense.element_valid, policy);
}

void refuse_nulls(int64_t nulls, int64_t rows, bool inside, const NullPolicy& policy,
                  const std::string& where) {
  TORCH_CHECK(nulls == 0 || policy.fill || policy.nulls == Nulls::kMask, where, " holds ", nulls, " null",
              nulls == 1 ? "" : "s", inside ? " inside of its lists" : "", " (it has ", rows,
              " rows); .nulls = lockstep::data::Nulls::kMask gives masks, .fill_nulls a value instead");
}

template <class Offset>
at::Tensor offsets_from(const Offset* source, int64_t rows) {
  at::Tensor result = at::empty({rows + 1}, at::kLong);
  auto* out = result.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i <= rows; ++i)
    out[i] = static_cast<int64_t>(source[i]) - static_cast<int64_t>(source[0]);
  return result;
}

at::Tensor no_offsets() {
  at::Tensor result = at::empty({1}, at::kLong);
  *result.mutable_data_ptr<int64_t>() = 0;
  return result;
}

/// Strings whose bytes lie one after the other, so that they can stay where they are.
template <class Array>
void adopt_strings(const Array& array, Column& column) {
  const auto* source = array.raw_value_offsets();
  column.offsets = offsets_from(source, array.length());
  column.values = wrap(array.value_data(), static_cast<int64_t>(source[0]),
                       {static_cast<int64_t>(source[array.length()] - source[0])}, at::kByte);
}

template <class Array>
void copy_strings(const Array& array, const std::string& null, Column& column) {
  column.offsets = at::empty({array.length() + 1}, at::kLong);
  auto* out = column.offsets.template mutable_data_ptr<int64_t>();
  out[0] = 0;
  const auto view = [&](int64_t i) { return array.IsNull(i) ? std::string_view(null) : array.GetView(i); };
  for (int64_t i = 0; i < array.length(); ++i) out[i + 1] = out[i] + static_cast<int64_t>(view(i).size());
  column.values = at::empty({out[array.length()]}, at::kByte);
  auto* bytes = static_cast<char*>(column.values.mutable_data_ptr());
  for (int64_t i = 0; i < array.length(); ++i) {
    const auto text = view(i);
    if (!text.empty()) std::memcpy(bytes + out[i], text.data(), text.size());
  }
}

Column to_strings(const arrow::Array& array, const NullPolicy& policy, const std::string& where) {
  refuse_nulls(array.null_count(), array.length(), false, policy, where);
  Column column;
  column.kind = Column::Kind::kStrings;
  const std::string null = policy.fill ? std::get<std::string>(*policy.fill) : std::string();
  const auto convert = [&](const auto& typed) {
    using Array = std::decay_t<decltype(typed)>;
    if constexpr (!std::is_same_v<Array, arrow::BinaryViewArray>) {
      if (array.null_count() == 0) return adopt_strings(typed, column);
    }
    copy_strings(typed, null, column);
  };
  if (array.length() == 0) {
    column.offsets = no_offsets();
    column.values = at::empty({0}, at::kByte);
  } else {
    switch (array.type_id()) {
      case Type::STRING:
      case Type::BINARY:
        convert(as<arrow::BinaryArray>(array));
        break;
      case Type::LARGE_STRING:
      case Type::LARGE_BINARY:
        convert(as<arrow::LargeBinaryArray>(array));
        break;
      default:
        convert(as<arrow::BinaryViewArray>(array));
        break;
    }
  }
  if (policy.nulls == Nulls::kMask) column.valid = mask_of(validity_of(array), {array.length()});
  return column;
}

template <class Array>
Column to_lists(const Array& array, const NullPolicy& policy, const std::string& where) {
  refuse_nulls(array.null_count(), array.length(), false, policy, where);
  Column column;
  column.kind = Column::Kind::kLists;
  int64_t first = 0;
  int64_t last = 0;
  if (array.length() > 0) {
    // The Parquet reader gives null lists no elements, so offsets need no mending.
    first = array.value_offset(0);
    last = array.value_offset(array.length());
    column.offsets = offsets_from(array.raw_value_offsets(), array.length());
  } else {
    column.offsets = no_offsets();
  }
  Dense elements = to_dense(*storage(array.values()->Slice(first, last - first)), where);
  auto& missing = elements.element_valid.empty() ? elements.valid : elements.element_valid;
  refuse_nulls(std::count(missing.begin(), missing.end(), false), array.length(), true, policy, where);
  settle(elements, policy);
  column.values = elements.values;
  if (policy.nulls == Nulls::kMask) {
    column.valid = mask_of(validity_of(array), {array.length()});
    // A null fixed-size list within a list has a flag for each of its numbers only if some are missing.
    const auto per_flag =
        missing.empty() ? 1 : elements.values.numel() / static_cast<int64_t>(missing.size());
    std::vector<bool> flags;
    for (const bool flag : missing) flags.insert(flags.end(), static_cast<size_t>(per_flag), flag);
    column.element_valid = mask_of(flags, elements.values.sizes());
  }
  return column;
}

Column to_numbers(const arrow::Array& array, const NullPolicy& policy, const std::string& where) {
  Dense dense = to_dense(array, where);
  refuse_nulls(array.null_count(), array.length(), false, policy, where);
  refuse_nulls(dense.null_elements, array.length(), true, policy, where);
  settle(dense, policy);
  Column column;
  column.values = dense.values;
  if (policy.nulls == Nulls::kMask) {
    column.valid = mask_of(dense.valid, {array.length()});
    if (array.type_id() == Type::FIXED_SIZE_LIST) {
      column.element_valid = mask_of(dense.element_valid, dense.values.sizes());
    }
  }
  return column;
}

Column convert(const std::shared_ptr<arrow::Array>& given, const NullPolicy& policy,
               const std::string& where);

/// The dictionary's values, each as often as indices name it. Row groups have dictionaries of their own, so
/// the indices alone would mean nothing.
Column from_dictionary(const arrow::DictionaryArray& array, const NullPolicy& policy,
                       const std::string& where) {
  refuse_nulls(array.null_count() + array.dictionary()->null_count(), array.length(), false, policy, where);
  // One more entry after the dictionary's stands for null.
  auto null_entry = arrow::MakeArrayOfNull(array.dictionary()->type(), 1);
  TORCH_CHECK(null_entry.ok(), where, ": ", null_entry.status().ToString());
  const NullPolicy entries{Nulls::kMask, policy.fill};
  const Column values = convert(array.dictionary(), entries, where);
  const Column null = convert(*null_entry, entries, where);
  const std::vector<const Column*> parts{&values, &null};
  std::vector<int64_t> rows(static_cast<size_t>(array.length()));
  for (int64_t i = 0; i < array.length(); ++i) {
    rows[static_cast<size_t>(i)] = array.IsNull(i) ? values.rows() : array.GetValueIndex(i);
  }
  Column column = Column::concat(parts).select(rows);
  if (policy.nulls != Nulls::kMask) column.valid = at::Tensor();
  return column;
}

Column convert(const std::shared_ptr<arrow::Array>& given, const NullPolicy& policy,
               const std::string& where) {
  const auto array = storage(given);
  switch (array->type_id()) {
    case Type::DICTIONARY:
      return from_dictionary(as<arrow::DictionaryArray>(*array), policy, where);
    case Type::LIST:
      return to_lists(as<arrow::ListArray>(*array), policy, where);
    case Type::LARGE_LIST:
      return to_lists(as<arrow::LargeListArray>(*array), policy, where);
    default:
      break;
  }
  return holds_strings(array->type_id()) ? to_strings(*array, policy, where)
                                         : to_numbers(*array, policy, where);
}

}  // namespace

Column to_column(const arrow::ChunkedArray& array, const NullPolicy& policy, const std::string& where) {
  refuse_nulls(array.null_count(), array.length(), false, policy, where);  // with the count of all chunks
  if (array.num_chunks() == 0) {
    auto empty = arrow::MakeEmptyArray(array.type());
    TORCH_CHECK(empty.ok(), where, ": ", empty.status().ToString());
    return convert(*empty, policy, where);
  }
  if (array.num_chunks() == 1) return convert(array.chunk(0), policy, where);
  std::vector<Column> parts;
  std::vector<const Column*> pointers;
  parts.reserve(static_cast<size_t>(array.num_chunks()));
  for (const auto& chunk : array.chunks()) {
    parts.push_back(convert(chunk, policy, where));
    pointers.push_back(&parts.back());
  }
  return Column::concat(pointers);
}

}  // namespace lockstep::parquet::internal
