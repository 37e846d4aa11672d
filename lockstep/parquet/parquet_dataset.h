#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <lockstep/parquet/nulls.h>
#include <lockstep/parquet/table.h>

namespace lockstep::data {

struct ParquetOptions {
  /// Columns to read, in this order; empty: all, as the first file has them.
  std::vector<std::string> columns = {};
  /// What nulls become in columns that fill_nulls does not name.
  Nulls nulls = Nulls::kRefuse;
  /// What stands in place of null, by column.
  std::map<std::string, FillValue> fill_nulls = {};
  /// Decode the columns of a row group in parallel, on Arrow's threads. For processes that are alone on their
  /// cores; the ranks of a job share them.
  bool use_threads = false;
};

/// A column, as the files have it.
struct ParquetField {
  std::string name;
  std::string type;  ///< in Arrow's words, "int64", "list<element: float>", "timestamp[us, tz=UTC]"
};

/// Parquet files, row group by row group, through Arrow C++. A data set for DataLoader whose samples are row
/// groups, numbered through all files.
///
///     ParquetDataset train("clicks.parquet", {.columns = {"age", "words", "label"}});
///     RowGroupSampler sampler(train);
///     ParquetBatches batches(train, {.batch_size = 64, .sampler = &sampler});      // or a DataLoader
///     for (auto& batch : batches) step(batch.tensor("age"), batch["words"], batch.tensor("label"));
///
/// What columns become (Column): int8 to int64, uint8, float16 to float64, bool: tensors of that type; uint16
/// int32, uint32 and uint64 int64; dates, times and timestamps the integers that are stored, in the unit that
/// schema() tells; lists of a fixed size and binary of a fixed size [N, k]; strings and binary, bytes and
/// offsets; lists of these numbers, elements and offsets; dictionaries, their values. Decimals, structs, maps
/// and lists of strings or of lists are refused. Numbers without nulls and the bytes of strings are Arrow's
/// memory, not a copy.
///
/// Files are opened when they are read. Immutable, so any number of threads may read; copies share what was
/// opened.
class ParquetDataset {
 public:
  /// `path`: a file; or a folder, of which all *.parquet are taken, sorted by name, but for those whose names
  /// begin with _ or a dot. Reads the footers.
  ///
  /// Throws c10::Error, naming the file, for files that are missing, truncated, damaged, encrypted or none of
  /// Parquet's, and for files with columns or types other than the first one's. Throws c10::ValueError for
  /// columns that are not there (and lists those that are), are there twice, or have a type that is refused.
  explicit ParquetDataset(const std::string& path, const ParquetOptions& options = {});
  /// Several files, in this order.
  explicit ParquetDataset(const std::vector<std::string>& files, const ParquetOptions& options = {});
  explicit ParquetDataset(std::initializer_list<std::string> files, const ParquetOptions& options = {})
      : ParquetDataset(std::vector<std::string>(files), options) {}

  /// The chosen columns.
  const std::vector<ParquetField>& schema() const;
  /// How many row groups there are.
  int64_t size() const;
  int64_t num_rows() const;
  /// Rows of each row group.
  const std::vector<int64_t>& row_counts() const;
  /// "row group 2 of clicks.parquet", for messages. Throws c10::IndexError outside of [0, size()).
  std::string describe(int64_t row_group) const;
  /// Bytes that get(row_group) will take, from the footer: exact for numbers, an upper bound for lists. For
  /// strings exact where the writer noted it (Arrow does since version 19, for flat columns); else too small
  /// where they repeat. Throws as describe() does.
  int64_t expected_bytes(int64_t row_group) const;

  /// A row group. Throws c10::IndexError outside of [0, size()); c10::Error, naming file, row group and
  /// column, for a damaged or changed file, nulls that are refused, and uint64 beyond 2^63 - 1.
  Table get(int64_t row_group) const;
  /// Several row groups, one after the other. Throws as get() does.
  Table get_batch(std::span<const int64_t> row_groups) const;

 private:
  struct Opened;
  std::shared_ptr<const Opened> opened_;
};

}  // namespace lockstep::data
