#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/parquet/internal/names.h>
#include <lockstep/parquet/table.h>

namespace lockstep::data {

Table::Table(std::shared_ptr<const std::vector<std::string>> names, std::vector<Column> columns, int64_t rows,
             int64_t row_group)
    : names_(std::move(names)), columns_(std::move(columns)), rows_(rows), row_group_(row_group) {
  TORCH_CHECK_VALUE(names_ && names_->size() == columns_.size(), "a Table needs as many names as columns");
  for (const Column& column : columns_) {
    TORCH_CHECK_VALUE(column.rows() == rows_, "a column has ", column.rows(), " rows, but the Table ", rows_);
  }
}

const std::vector<std::string>& Table::names() const {
  static const std::vector<std::string> none;
  return names_ ? *names_ : none;
}

const Column& Table::operator[](const std::string& name) const {
  const auto place = std::find(names().begin(), names().end(), name);
  TORCH_CHECK_VALUE(place != names().end(), "there is no column '", name, "'; the columns are ",
                    parquet::internal::quoted_list(names()));
  return columns_[static_cast<size_t>(place - names().begin())];
}

const at::Tensor& Table::tensor(const std::string& name) const {
  const Column& column = (*this)[name];
  TORCH_CHECK_TYPE(column.kind == Column::Kind::kNumbers, "column '", name, "' holds ",
                   column.kind == Column::Kind::kStrings ? "strings" : "lists",
                   ", which no single tensor holds; use table[\"", name, "\"]: its values and offsets");
  return column.values;
}

at::Tensor Table::matrix(const std::vector<std::string>& names, at::ScalarType dtype) const {
  std::vector<at::Tensor> parts;
  int64_t width = 0;
  for (const std::string& name : names) {
    const at::Tensor& values = tensor(name);
    parts.push_back(values.dim() == 1 ? values.unsqueeze(1) : values.flatten(1));
    width += parts.back().size(1);
  }
  at::Tensor result = at::empty({rows_, width}, dtype);
  int64_t position = 0;
  for (const at::Tensor& part : parts) {
    result.narrow(1, position, part.size(1)).copy_(part);
    position += part.size(1);
  }
  return result;
}

int64_t Table::nbytes() const {
  int64_t bytes = 0;
  for (const Column& column : columns_) bytes += column.nbytes();
  return bytes;
}

Table Table::slice(int64_t begin, int64_t end) const {
  TORCH_CHECK_INDEX(0 <= begin && begin <= end && end <= rows_, "rows ", begin, " to ", end,
                    " (exclusive) are out of range for a table with ", rows_, " rows");
  Table result = *this;
  for (Column& column : result.columns_) column = column.slice(begin, end);
  result.rows_ = end - begin;
  return result;
}

Table Table::select(std::span<const int64_t> rows) const {
  Table result = *this;
  for (Column& column : result.columns_) column = column.select(rows);
  result.rows_ = static_cast<int64_t>(rows.size());
  return result;
}

Table Table::clone() const {
  return concat({this, 1});
}

Table Table::concat(std::span<const Table> parts) {
  TORCH_CHECK_VALUE(!parts.empty(), "there are no tables to put together");
  Table result = parts.front();
  std::vector<const Column*> pieces(parts.size());
  for (size_t c = 0; c < result.columns_.size(); ++c) {
    for (size_t p = 0; p < parts.size(); ++p) {
      TORCH_CHECK_VALUE(parts[p].names_ == result.names_ || parts[p].names() == result.names(),
                        "tables with different columns cannot be put together: ",
                        parquet::internal::quoted_list(result.names()), " and ",
                        parquet::internal::quoted_list(parts[p].names()));
      pieces[p] = &parts[p].columns_[c];
    }
    result.columns_[c] = Column::concat(pieces);
  }
  for (const Table& part : parts.subspan(1)) {
    result.rows_ += part.rows_;
    if (part.row_group_ != result.row_group_) result.row_group_ = -1;
  }
  return result;
}

}  // namespace lockstep::data
