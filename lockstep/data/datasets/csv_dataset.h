#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <lockstep/data/example.h>

namespace lockstep::data {

/// A column by its position, from 0, or by its name in the header.
using CsvColumn = std::variant<int64_t, std::string>;
/// The strings of a column that stand for 0, 1, 2, …; by column name, or "column 3" in a file without header.
using CsvCategories = std::map<std::string, std::vector<std::string>>;

struct CsvOptions {
  /// What the model sees, in this order. Empty: all columns but the target.
  std::vector<CsvColumn> features = {};
  /// What it should predict. None: targets are empty tensors.
  std::optional<CsvColumn> target = std::nullopt;
  /// Columns of strings: each different string becomes a number, counted from 0 in sorted order.
  std::vector<CsvColumn> categories = {};
  /// Numbers of strings from elsewhere, as CsvDataset::categories() of the training data; others are errors.
  CsvCategories known_categories = {};
  /// The type of the features: float32 or float64.
  at::ScalarType dtype = at::kFloat;
  /// The type of the target: float32, float64 or int64. None: int64 for categories, otherwise as the features.
  std::optional<at::ScalarType> target_dtype = std::nullopt;
  /// The first row holds names.
  bool header = true;
  char delimiter = ',';
  char quote = '"';
  /// Instead of a missing value (NaN is allowed). None: a missing value is an error. For numbers only: in a
  /// column of categories the missing ones are a category like any other.
  std::optional<double> fill_value = std::nullopt;
  /// What counts as missing, beside nothing at all, without the blanks around it. For example "NA", "?".
  std::vector<std::string> missing_values = {};
};

/// The rows of a CSV file, in memory as tensors. Plain or gzip, told by the first bytes; RFC 4180 (see
/// internal/csv_reader.h for what is allowed beyond it).
///
///     CsvDataset iris("iris.csv", {.target = "species", .categories = {"species"}});
///
/// A data set for DataLoader. Numbers are what Python's float() reads (but for digits with underscores):
/// decimal, blanks around them don't matter, and "inf" and "nan" are numbers.
///
/// Immutable after construction: any number of threads may read it. Copies share the memory.
class CsvDataset {
 public:
  /// Reads the whole file. Throws c10::ValueError for options that contradict each other, c10::Error that
  /// names the file, and row and column where they matter: it can't be read; is damaged (see CsvReader) or
  /// has no row; no column of that name, or two; a row with more or fewer fields than the first; no number; a
  /// number missing, or not an integer where target_dtype is int64; a string not in known_categories. Throws
  /// c10::OutOfMemoryError when it needs more memory than the system has available.
  explicit CsvDataset(const std::string& path, const CsvOptions& options = {});

  int64_t size() const { return features_.size(0); }
  /// Features, one dimension, and target, a scalar. Throws c10::IndexError for an index outside [0, size()).
  Example get(int64_t index) const;
  /// Features B×F and targets B. Throws as get() does.
  Example get_batch(std::span<const int64_t> indices) const;

  /// All rows, N×F and N (N×0 without a target). Not to be written to.
  const at::Tensor& features() const { return features_; }
  const at::Tensor& targets() const { return targets_; }
  /// The names of the features, or "column 3".
  const std::vector<std::string>& feature_names() const { return feature_names_; }
  /// The strings of 0, of 1, … for each column of categories.
  const CsvCategories& categories() const { return categories_; }

 private:
  at::Tensor features_;
  at::Tensor targets_;
  std::vector<std::string> feature_names_;
  CsvCategories categories_;
};

}  // namespace lockstep::data
