#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/parquet/column.h>

// Everything here is copying of bytes, in plain loops: it runs in background threads, where ATen's operations
// would start a second team of OpenMP threads.
namespace lockstep::data {
namespace {

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

/// Like `tensor`, with `rows` rows.
at::Tensor empty_rows(const at::Tensor& tensor, int64_t rows) {
  auto sizes = tensor.sizes().vec();
  sizes[0] = rows;
  return at::empty(sizes, tensor.options());
}

int64_t row_bytes(const at::Tensor& tensor) {
  int64_t elements = 1;
  for (const int64_t size : tensor.sizes().slice(1)) elements *= size;
  return elements * static_cast<int64_t>(tensor.itemsize());
}

const char* bytes_at(const at::Tensor& tensor, int64_t row) {
  return static_cast<const char*>(tensor.const_data_ptr()) + row * row_bytes(tensor);
}

template <size_t kBytes>
void gather(const char* source, std::span<const int64_t> rows, char* out) {
  for (size_t i = 0; i < rows.size(); ++i) {
    // A copy of a constant size is one instruction.
    std::memcpy(out + i * kBytes, source + rows[i] * static_cast<int64_t>(kBytes), kBytes);
  }
}

at::Tensor select_rows(const at::Tensor& given, std::span<const int64_t> rows) {
  if (!given.defined()) return {};
  const at::Tensor tensor = given.contiguous();
  at::Tensor result = empty_rows(tensor, static_cast<int64_t>(rows.size()));
  const auto* source = static_cast<const char*>(tensor.const_data_ptr());
  auto* out = static_cast<char*>(result.mutable_data_ptr());
  const int64_t width = row_bytes(tensor);
  switch (width) {
    case 1:
      gather<1>(source, rows, out);
      break;
    case 2:
      gather<2>(source, rows, out);
      break;
    case 4:
      gather<4>(source, rows, out);
      break;
    case 8:
      gather<8>(source, rows, out);
      break;
    default:
      for (size_t i = 0; i < rows.size() && width > 0; ++i) {
        std::memcpy(out + static_cast<int64_t>(i) * width, source + rows[i] * width,
                    static_cast<size_t>(width));
      }
  }
  return result;
}

/// Copies the parts [begin, end) that `ranges` names, one after the other; `rows` in all.
at::Tensor select_ranges(const at::Tensor& given, std::span<const std::pair<int64_t, int64_t>> ranges,
                         int64_t rows) {
  if (!given.defined()) return {};
  const at::Tensor tensor = given.contiguous();
  at::Tensor result = empty_rows(tensor, rows);
  auto* out = static_cast<char*>(result.mutable_data_ptr());
  const int64_t width = row_bytes(tensor);
  for (const auto& [begin, end] : ranges) {
    const int64_t bytes = (end - begin) * width;
    if (bytes > 0) std::memcpy(out, bytes_at(tensor, begin), static_cast<size_t>(bytes));
    out += bytes;
  }
  return result;
}

at::Tensor narrow_rows(const at::Tensor& tensor, int64_t begin, int64_t end) {
  return tensor.defined() ? tensor.narrow(0, begin, end - begin) : tensor;
}

at::Tensor concat_rows(std::span<const Column* const> parts, at::Tensor Column::*member) {
  const at::Tensor& first = parts.front()->*member;
  int64_t rows = 0;
  for (const Column* part : parts) {
    const at::Tensor& tensor = part->*member;
    TORCH_CHECK_VALUE(tensor.defined() == first.defined() &&
                          (!first.defined() || (tensor.scalar_type() == first.scalar_type() &&
                                                tensor.sizes().slice(1) == first.sizes().slice(1))),
                      "columns of different types, shapes or masks cannot be put together");
    if (tensor.defined()) rows += tensor.size(0);
  }
  if (!first.defined()) return {};
  at::Tensor result = empty_rows(first, rows);
  auto* out = static_cast<char*>(result.mutable_data_ptr());
  for (const Column* part : parts) {
    const at::Tensor tensor = (part->*member).contiguous();
    if (tensor.nbytes() > 0) std::memcpy(out, tensor.const_data_ptr(), tensor.nbytes());
    out += tensor.nbytes();
  }
  return result;
}

const char* name_of(Column::Kind kind) {
  return kind == Column::Kind::kNumbers ? "numbers" : kind == Column::Kind::kStrings ? "strings" : "lists";
}

void check_row(int64_t row, int64_t rows) {
  TORCH_CHECK_INDEX(row >= 0 && row < rows, "row ", row, " is out of range for a column with ", rows,
                    " rows");
}

}  // namespace

int64_t Column::rows() const {
  if (offsets.defined()) return offsets.size(0) - 1;
  return values.defined() ? values.size(0) : 0;
}

int64_t Column::nbytes() const {
  return bytes_of(values) + bytes_of(offsets) + bytes_of(valid) + bytes_of(element_valid);
}

std::string_view Column::string(int64_t row) const {
  TORCH_CHECK_TYPE(kind == Kind::kStrings, "the column holds ", name_of(kind), ", not strings");
  check_row(row, rows());
  const int64_t* bounds = offsets.const_data_ptr<int64_t>() + row;
  return {bytes_at(values, bounds[0]), static_cast<size_t>(bounds[1] - bounds[0])};
}

std::vector<std::string> Column::strings() const {
  TORCH_CHECK_TYPE(kind == Kind::kStrings, "the column holds ", name_of(kind), ", not strings");
  std::vector<std::string> result;
  result.reserve(static_cast<size_t>(rows()));
  for (int64_t row = 0; row < rows(); ++row) result.emplace_back(string(row));
  return result;
}

at::Tensor Column::list(int64_t row) const {
  TORCH_CHECK_TYPE(kind == Kind::kLists, "the column holds ", name_of(kind), ", not lists");
  check_row(row, rows());
  const int64_t* bounds = offsets.const_data_ptr<int64_t>() + row;
  return narrow_rows(values, bounds[0], bounds[1]);
}

Column Column::slice(int64_t begin, int64_t end) const {
  TORCH_CHECK_INDEX(0 <= begin && begin <= end && end <= rows(), "rows ", begin, " to ", end,
                    " (exclusive) are out of range for a column with ", rows(), " rows");
  Column result;
  result.kind = kind;
  result.valid = narrow_rows(valid, begin, end);
  if (!offsets.defined()) {
    result.values = narrow_rows(values, begin, end);
    result.element_valid = narrow_rows(element_valid, begin, end);
    return result;
  }
  const int64_t* bounds = offsets.const_data_ptr<int64_t>() + begin;
  const int64_t first = bounds[0];
  const int64_t last = bounds[end - begin];
  result.offsets = at::empty({end - begin + 1}, offsets.options());
  auto* out = result.offsets.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i <= end - begin; ++i) out[i] = bounds[i] - first;
  result.values = narrow_rows(values, first, last);
  result.element_valid = narrow_rows(element_valid, first, last);
  return result;
}

Column Column::select(std::span<const int64_t> chosen) const {
  const int64_t count = rows();
  for (const int64_t row : chosen) check_row(row, count);
  Column result;
  result.kind = kind;
  result.valid = select_rows(valid, chosen);
  if (!offsets.defined()) {
    result.values = select_rows(values, chosen);
    result.element_valid = select_rows(element_valid, chosen);
    return result;
  }
  const auto* bounds = offsets.const_data_ptr<int64_t>();
  result.offsets = at::empty({static_cast<int64_t>(chosen.size()) + 1}, offsets.options());
  auto* out = result.offsets.mutable_data_ptr<int64_t>();
  std::vector<std::pair<int64_t, int64_t>> ranges;
  ranges.reserve(chosen.size());
  out[0] = 0;
  for (size_t i = 0; i < chosen.size(); ++i) {
    ranges.emplace_back(bounds[chosen[i]], bounds[chosen[i] + 1]);
    out[i + 1] = out[i] + ranges.back().second - ranges.back().first;
  }
  result.values = select_ranges(values, ranges, out[chosen.size()]);
  result.element_valid = select_ranges(element_valid, ranges, out[chosen.size()]);
  return result;
}

Column Column::clone() const {
  const Column* self = this;
  return concat({&self, 1});
}

Column Column::concat(std::span<const Column* const> parts) {
  TORCH_CHECK_VALUE(!parts.empty(), "there are no columns to put together");
  Column result;
  result.kind = parts.front()->kind;
  for (const Column* part : parts) {
    TORCH_CHECK_VALUE(part->kind == result.kind, "a column of ", name_of(result.kind), " and one of ",
                      name_of(part->kind), " cannot be put together");
  }
  result.values = concat_rows(parts, &Column::values);
  result.valid = concat_rows(parts, &Column::valid);
  result.element_valid = concat_rows(parts, &Column::element_valid);
  if (!parts.front()->offsets.defined()) return result;
  int64_t rows = 0;
  for (const Column* part : parts) rows += part->rows();
  result.offsets = at::empty({rows + 1}, parts.front()->offsets.options());
  auto* out = result.offsets.mutable_data_ptr<int64_t>();
  *out = 0;
  for (const Column* part : parts) {
    const auto* bounds = part->offsets.const_data_ptr<int64_t>();
    const int64_t base = *out;
    for (int64_t i = 1; i <= part->rows(); ++i) *++out = base + bounds[i];
  }
  return result;
}

}  // namespace lockstep::data
