#include <algorithm>
#include <arrow/chunked_array.h>
#include <arrow/io/file.h>
#include <arrow/table.h>
#include <exception>
#include <parquet/arrow/reader.h>
#include <parquet/arrow/schema.h>
#include <parquet/file_reader.h>
#include <parquet/metadata.h>
#include <parquet/size_statistics.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/parquet/internal/parquet_file.h>

namespace lockstep::parquet::internal {
namespace {

/// Runs what Arrow does with the file; its errors, statuses and exceptions, become c10's.
template <class Function>
auto guarded(const std::string& what, Function function) {
  std::string message;
  try {
    return function();
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    message = error.what();
  }
  TORCH_CHECK(false, "cannot read ", what, ": ", message);
}

template <class Value>
Value value_of(arrow::Result<Value> result, const std::string& what) {
  TORCH_CHECK(result.ok(), "cannot read ", what, ": ", result.status().message());
  return std::move(result).ValueUnsafe();
}

void check(const arrow::Status& status, const std::string& what) {
  TORCH_CHECK(status.ok(), "cannot read ", what, ": ", status.message());
}

/// Parquet ends with "PAR1", or "PARE" where the footer is encrypted; begins with the same.
void check_magic(arrow::io::RandomAccessFile& file, int64_t size, const std::string& path) {
  constexpr int64_t kMagic = 4;
  constexpr int64_t kSmallest = 12;  // magic, length of the footer, magic
  TORCH_CHECK(size >= kSmallest, path, " is not a Parquet file: it has ", size,
              " bytes, and the smallest has ", kSmallest);
  const auto begin = value_of(file.ReadAt(0, kMagic), path)->ToString();
  const auto end = value_of(file.ReadAt(size - kMagic, kMagic), path)->ToString();
  TORCH_CHECK(end != "PARE", path, " is encrypted, which is not supported; write it without encryption");
  TORCH_CHECK(begin == "PAR1", path, " is not a Parquet file: it does not begin with PAR1");
  TORCH_CHECK(end == "PAR1", path,
              " does not end as a Parquet file does, with PAR1: it is truncated, or its "
              "writer was not closed; fetch or write it again");
}

void add_leaves(const ::parquet::arrow::SchemaField& field, std::vector<int>& leaves) {
  if (field.is_leaf()) leaves.push_back(field.column_index);
  for (const auto& child : field.children) add_leaves(child, leaves);
}

std::unique_ptr<::parquet::arrow::FileReader> reader_of(std::shared_ptr<arrow::io::RandomAccessFile> file,
                                                        std::shared_ptr<::parquet::FileMetaData> metadata,
                                                        bool use_threads, const std::string& what) {
  ::parquet::arrow::FileReaderBuilder builder;
  ::parquet::ReaderProperties properties;
  properties.set_page_checksum_verification(true);  // of those pages that have one
  check(builder.Open(std::move(file), properties, std::move(metadata)), what);
  ::parquet::ArrowReaderProperties arrow_properties(use_threads);
  arrow_properties.set_pre_buffer(false);  // which is for remote files, and takes further threads
  builder.properties(arrow_properties);
  return value_of(builder.Build(), what);
}

}  // namespace

ParquetFile::ParquetFile(std::string path) : path_(std::move(path)) {
  guarded(path_, [&] {
    auto file = value_of(arrow::io::ReadableFile::Open(path_), path_);
    size_ = value_of(file->GetSize(), path_);
    check_magic(*file, size_, path_);
    const auto reader = reader_of(std::move(file), nullptr, false, path_);
    metadata_ = reader->parquet_reader()->metadata();
    TORCH_CHECK(!metadata_->is_encryption_algorithm_set(), path_,
                " has encrypted columns, which is not supported; write it without encryption");
    check(reader->GetSchema(&schema_), path_);
    for (const auto& field : reader->manifest().schema_fields) {
      leaves_.emplace_back();
      add_leaves(field, leaves_.back());
    }
  });
}

int ParquetFile::row_groups() const {
  return metadata_->num_row_groups();
}

int64_t ParquetFile::rows(int row_group) const {
  return metadata_->RowGroup(row_group)->num_rows();
}

ParquetFile::ColumnContent ParquetFile::content(int row_group, int column) const {
  return guarded(path_, [&] {
    const auto group = metadata_->RowGroup(row_group);
    ColumnContent content;
    for (const int leaf : leaves_[static_cast<size_t>(column)]) {
      const auto chunk = group->ColumnChunk(leaf);
      content.elements += chunk->num_values();
      const auto statistics = chunk->size_statistics();
      content.string_bytes += statistics && statistics->unencoded_byte_array_data_bytes
                                  ? *statistics->unencoded_byte_array_data_bytes
                                  : chunk->total_uncompressed_size();
    }
    return content;
  });
}

std::vector<std::shared_ptr<arrow::ChunkedArray>> ParquetFile::read(int row_group,
                                                                    const std::vector<int>& columns,
                                                                    bool use_threads) const {
  const std::string what = "row group " + std::to_string(row_group) + " of " + path_;
  return guarded(what, [&] {
    auto file = value_of(arrow::io::ReadableFile::Open(path_), what);
    const int64_t size = value_of(file->GetSize(), what);
    TORCH_CHECK(size == size_, path_, " had ", size_, " bytes when it was opened, and has ", size,
                " now; leave a data set's files alone while it is in use");
    std::vector<int> leaves;
    for (const int column : columns) {
      const auto& some = leaves_[static_cast<size_t>(column)];
      leaves.insert(leaves.end(), some.begin(), some.end());
    }
    const auto reader = reader_of(std::move(file), metadata_, use_threads, what);
    const auto table = value_of(reader->ReadRowGroup(row_group, leaves), what);
    std::vector<std::shared_ptr<arrow::ChunkedArray>> arrays;
    for (const int column : columns) {
      const auto& name = schema_->field(column)->name();
      auto array = table->GetColumnByName(name);
      TORCH_CHECK(array && array->length() == rows(row_group), "column '", name, "' in ", what, " has ",
                  array ? array->length() : 0, " values, but the row group ", rows(row_group),
                  " rows; the file is damaged");
      check(array->Validate(), what);
      arrays.push_back(std::move(array));
    }
    return arrays;
  });
}

}  // namespace lockstep::parquet::internal
