#include <algorithm>
#include <arrow/chunked_array.h>
#include <arrow/type.h>
#include <filesystem>
#include <numeric>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/parquet/internal/arrow_columns.h>
#include <lockstep/parquet/internal/arrow_types.h>
#include <lockstep/parquet/internal/names.h>
#include <lockstep/parquet/internal/parquet_file.h>
#include <lockstep/parquet/parquet_dataset.h>

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;
using parquet::internal::NullPolicy;
using parquet::internal::ParquetFile;
using parquet::internal::quoted_list;

std::vector<std::string> files_at(const std::string& path) {
  std::error_code problem;
  if (!fs::is_directory(path, problem)) {
    TORCH_CHECK(fs::exists(path, problem), "there is no file or folder '", path, "'");
    return {path};
  }
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(path, problem)) {
    const auto name = entry.path().filename().string();
    if (entry.path().extension() == ".parquet" && name[0] != '_' && name[0] != '.') {
      files.push_back(entry.path().string());
    }
  }
  TORCH_CHECK(!problem, "cannot list the folder ", path, ": ", problem.message());
  TORCH_CHECK(!files.empty(), "the folder ", path,
              " holds no *.parquet file (its subfolders are not looked at)");
  std::sort(files.begin(), files.end());
  return files;
}

/// The numbers of these columns in a file.
std::vector<int> find_columns(const ParquetFile& file, const std::vector<std::string>& names) {
  std::vector<int> columns;
  for (const std::string& name : names) {
    const auto places = file.schema().GetAllFieldIndices(name);
    TORCH_CHECK_VALUE(!places.empty(), file.path(), " has no column '", name, "'; its columns are ",
                      quoted_list(file.schema().field_names()));
    TORCH_CHECK_VALUE(places.size() == 1, file.path(), " has ", places.size(), " columns that are called '",
                      name, "'; write it with names of their own, or leave them out with .columns");
    columns.push_back(places.front());
  }
  return columns;
}

void check_supported(const ParquetFile& file, const std::vector<int>& columns) {
  for (const int column : columns) {
    const auto& field = *file.schema().field(column);
    const auto reason = parquet::internal::why_unsupported(*field.type());
    TORCH_CHECK_VALUE(!reason, "column '", field.name(), "' of ", file.path(), " is ",
                      field.type()->ToString(), ", which can't be read: ", reason.value_or(""),
                      ", or leave it out with .columns");
  }
}

}  // namespace

struct ParquetDataset::Opened {
  struct Source {
    ParquetFile file;
    std::vector<int> columns;  // the chosen ones, as the file numbers them
  };

  std::vector<Source> sources;
  std::vector<std::pair<size_t, int>> places;  // of each row group: source, and number within it
  std::vector<int64_t> row_counts;
  int64_t num_rows = 0;
  std::shared_ptr<std::vector<std::string>> names;
  std::vector<ParquetField> schema;
  std::vector<std::shared_ptr<arrow::DataType>> types;
  std::vector<NullPolicy> policies;
  bool use_threads = false;

  Opened(const std::vector<std::string>& files, const ParquetOptions& options);
  void check_like_first(const ParquetFile& file, bool all_columns) const;
  const std::pair<size_t, int>& place(int64_t row_group) const;
};

ParquetDataset::Opened::Opened(const std::vector<std::string>& files, const ParquetOptions& options)
    : names(std::make_shared<std::vector<std::string>>(options.columns)), use_threads(options.use_threads) {
  TORCH_CHECK_VALUE(!files.empty(), "ParquetDataset: there are no files");
  for (const std::string& path : files) {
    ParquetFile file(path);
    if (sources.empty()) {
      if (names->empty()) *names = file.schema().field_names();
    } else {
      check_like_first(file, options.columns.empty());
    }
    auto columns = find_columns(file, *names);
    check_supported(file, columns);
    for (int group = 0; group < file.row_groups(); ++group) {
      places.emplace_back(sources.size(), group);
      row_counts.push_back(file.rows(group));
    }
    sources.push_back({std::move(file), std::move(columns)});
  }
  TORCH_CHECK_VALUE(!names->empty(), files.front(), " has no columns");
  auto sorted = *names;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  TORCH_CHECK_VALUE(twice == sorted.end(), ".columns names '", *twice, "' twice");
  num_rows = std::accumulate(row_counts.begin(), row_counts.end(), int64_t{0});

  const Source& first = sources.front();
  for (const int column : first.columns) {
    const auto& field = *first.file.schema().field(column);
    schema.push_back({field.name(), field.type()->ToString()});
    types.push_back(field.type());
    policies.push_back({options.nulls, std::nullopt});
  }
  for (const auto& [name, value] : options.fill_nulls) {
    const auto place = std::find(names->begin(), names->end(), name);
    TORCH_CHECK_VALUE(place != names->end(), ".fill_nulls names a column '", name, "'; the columns are ",
                      quoted_list(*names));
    const auto column = static_cast<size_t>(place - names->begin());
    parquet::internal::check_fill_value(*types[column], value, "column '" + name + "'");
    policies[column].fill = value;
  }
}

/// Batches span files, so a column must have one type in all of them.
void ParquetDataset::Opened::check_like_first(const ParquetFile& file, bool all_columns) const {
  const ParquetFile& first = sources.front().file;
  if (all_columns) {
    for (const std::string& name : file.schema().field_names()) {
      TORCH_CHECK(first.schema().GetFieldIndex(name) >= 0, file.path(), " has a column '", name, "', which ",
                  first.path(), " has not; name the columns to read in .columns");
    }
  }
  const auto columns = find_columns(file, *names);
  for (size_t i = 0; i < columns.size(); ++i) {
    const auto& type = *file.schema().field(columns[i])->type();
    const auto& expected = *first.schema().field(sources.front().columns[i])->type();
    TORCH_CHECK(type.Equals(expected), "column '", (*names)[i], "' is ", type.ToString(), " in ", file.path(),
                ", but ", expected.ToString(), " in ", first.path(), "; write both with one type");
  }
}

const std::pair<size_t, int>& ParquetDataset::Opened::place(int64_t row_group) const {
  TORCH_CHECK_INDEX(row_group >= 0 && row_group < static_cast<int64_t>(places.size()), "row group ",
                    row_group, " is out of range for a ParquetDataset with ", places.size(), " row groups");
  return places[static_cast<size_t>(row_group)];
}

ParquetDataset::ParquetDataset(const std::string& path, const ParquetOptions& options)
    : ParquetDataset(files_at(path), options) {}

ParquetDataset::ParquetDataset(const std::vector<std::string>& files, const ParquetOptions& options)
    : opened_(std::make_shared<Opened>(files, options)) {}

const std::vector<ParquetField>& ParquetDataset::schema() const {
  return opened_->schema;
}

int64_t ParquetDataset::size() const {
  return static_cast<int64_t>(opened_->places.size());
}

int64_t ParquetDataset::num_rows() const {
  return opened_->num_rows;
}

const std::vector<int64_t>& ParquetDataset::row_counts() const {
  return opened_->row_counts;
}

std::string ParquetDataset::describe(int64_t row_group) const {
  const auto& [source, number] = opened_->place(row_group);
  return "row group " + std::to_string(number) + " of " + opened_->sources[source].file.path();
}

int64_t ParquetDataset::expected_bytes(int64_t row_group) const {
  const auto& [number, group] = opened_->place(row_group);
  const auto& source = opened_->sources[number];
  const int64_t rows = opened_->row_counts[static_cast<size_t>(row_group)];
  int64_t bytes = 0;
  for (size_t i = 0; i < source.columns.size(); ++i) {
    const auto size = parquet::internal::column_size(*opened_->types[i], opened_->policies[i].nulls);
    bytes += rows * size.per_row;
    if (size.per_element == 0 && !size.strings) continue;
    const auto content = source.file.content(group, source.columns[i]);
    bytes += static_cast<int64_t>(sizeof(int64_t));  // one offset more than rows
    bytes += content.elements * size.per_element + (size.strings ? content.string_bytes : 0);
  }
  return bytes;
}

Table ParquetDataset::get(int64_t row_group) const {
  const auto& [number, group] = opened_->place(row_group);
  const auto& source = opened_->sources[number];
  auto arrays = source.file.read(group, source.columns, opened_->use_threads);
  std::vector<Column> columns;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const std::string where = "column '" + (*opened_->names)[i] + "' in " + describe(row_group);
    columns.push_back(parquet::internal::to_column(*arrays[i], opened_->policies[i], where));
    arrays[i].reset();  // what was copied need not be there twice
  }
  return {opened_->names, std::move(columns), opened_->row_counts[static_cast<size_t>(row_group)], row_group};
}

Table ParquetDataset::get_batch(std::span<const int64_t> row_groups) const {
  TORCH_CHECK_VALUE(!row_groups.empty(), "ParquetDataset::get_batch() needs at least one row group");
  if (row_groups.size() == 1) return get(row_groups.front());
  std::vector<Table> parts;
  parts.reserve(row_groups.size());
  for (const int64_t row_group : row_groups) parts.push_back(get(row_group));
  return Table::concat(parts);
}

}  // namespace lockstep::data
