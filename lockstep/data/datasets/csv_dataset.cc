#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <unordered_map>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/base/process/memory.h>
#include <lockstep/base/text/without_blanks.h>
#include <lockstep/data/datasets/csv_dataset.h>
#include <lockstep/data/datasets/internal/csv_reader.h>

namespace lockstep::data {
namespace {

using internal::CsvReader;

constexpr size_t kMostCategories = 1 << 24;  // float32 holds these integers exactly

/// Throws when `bytes` more don't fit into memory, which the allocator would not tell: the kernel promises
/// memory that it doesn't have, and ends the process that uses it.
void check_fits(int64_t bytes, const std::string& path) {
  const MemoryLimits limits = read_memory_limits();
  const int64_t left = std::min(limits.available, limits.cgroup_left);
  TORCH_CHECK_WITH(OutOfMemoryError, bytes <= left, path, ": its rows need ", format_bytes(bytes),
                   " more of memory, and ", format_bytes(left),
                   " are available; select fewer columns, or split the file");
}

/// Numbers one after the other, whose count is not known beforehand.
class NumberBuffer {
 public:
  explicit NumberBuffer(at::ScalarType dtype) : dtype_(dtype), element_(c10::elementSize(dtype)) {}

  void append(double value, const std::string& path) {
    if (bytes_.size() + element_ > bytes_.capacity()) grow(path);
    bytes_.resize(bytes_.size() + element_);
    put(bytes_.size() - element_, value);
  }
  void append_integer(int64_t value, const std::string& path) {
    append(0, path);
    std::memcpy(bytes_.data() + bytes_.size() - element_, &value, sizeof value);
  }
  /// Replaces the codes at first, first + step, … by what they stand for.
  void translate(size_t first, size_t step, const std::vector<int64_t>& meaning) {
    for (size_t at = first * element_; at < bytes_.size(); at += step * element_) {
      put(at, static_cast<double>(meaning[static_cast<size_t>(get(at))]));
    }
  }
  /// The numbers as a tensor, which takes over the memory.
  at::Tensor to_tensor(at::IntArrayRef shape) && {
    auto* bytes = new std::vector<uint8_t>(std::move(bytes_));
    return at::from_blob(
        bytes->data(), shape, [bytes](void*) { delete bytes; }, at::TensorOptions().dtype(dtype_));
  }

 private:
  static constexpr size_t kFirstCapacity = 1 << 16;

  void grow(const std::string& path) {
    const size_t capacity = std::max(kFirstCapacity, 2 * bytes_.capacity());
    check_fits(static_cast<int64_t>(capacity), path);
    bytes_.reserve(capacity);
  }
  void put(size_t at, double value) {
    if (dtype_ == at::kFloat) {
      const auto number = static_cast<float>(value);
      std::memcpy(bytes_.data() + at, &number, sizeof number);
    } else if (dtype_ == at::kDouble) {
      std::memcpy(bytes_.data() + at, &value, sizeof value);
    } else {
      const auto number = static_cast<int64_t>(value);
      std::memcpy(bytes_.data() + at, &number, sizeof number);
    }
  }
  double get(size_t at) const {
    if (dtype_ == at::kFloat) return read<float>(at);
    return dtype_ == at::kDouble ? read<double>(at) : static_cast<double>(read<int64_t>(at));
  }
  template <class T>
  T read(size_t at) const {
    T value;
    std::memcpy(&value, bytes_.data() + at, sizeof value);
    return value;
  }

  at::ScalarType dtype_;
  size_t element_;
  std::vector<uint8_t> bytes_;
};

/// The whole text as a number, or nothing.
template <class T>
std::optional<T> parse(std::string_view text) {
  if (text.starts_with('+') && !text.substr(1).starts_with('-')) text.remove_prefix(1);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end != text.data() + text.size() || text.empty()) return std::nullopt;
  if (error == std::errc()) return value;
  if constexpr (std::is_same_v<T, double>) {
    // Too large or too small: infinity or zero, as Python's float(). from_chars has seen that it is a number.
    if (error == std::errc::result_out_of_range) return std::strtod(std::string(text).c_str(), nullptr);
  }
  return std::nullopt;
}

/// The strings of a column of categories, numbered as they come; sorted at the end.
struct CategoryColumn {
  std::unordered_map<std::string, int64_t> codes;
  bool known = false;  // the codes were given, and are final
};

/// A column that is read.
struct LoadedColumn {
  size_t position = 0;
  std::string name;
  CategoryColumn* categories = nullptr;  // none: numbers
};

std::string name_of(const CsvColumn& column) {
  return std::holds_alternative<std::string>(column) ? "'" + std::get<std::string>(column) + "'"
                                                     : std::to_string(std::get<int64_t>(column));
}

/// One pass over a file.
class CsvLoader {
 public:
  CsvLoader(const std::string& path, const CsvOptions& options)
      : options_(options),
        reader_(path, options.delimiter, options.quote),
        target_dtype_(options.target_dtype.value_or(options.dtype)),
        features_(options.dtype),
        targets_(target_dtype_) {
    TORCH_CHECK_VALUE(options.dtype == at::kFloat || options.dtype == at::kDouble,
                      "CsvOptions.dtype is float32 or float64, not ", options.dtype);
    TORCH_CHECK(reader_.next(), path, ": the file holds no row");
    name_columns();
    choose_columns();
    const bool category = target_ && target_->categories != nullptr;
    if (category && !options.target_dtype) target_dtype_ = at::kLong;
    TORCH_CHECK_VALUE(
        target_dtype_ == at::kFloat || target_dtype_ == at::kDouble || target_dtype_ == at::kLong,
        "CsvOptions.target_dtype is float32, float64 or int64, not ", target_dtype_);
    targets_ = NumberBuffer(target_dtype_);
  }

  void read() {
    // Without a header the first row is one of data already.
    bool more = options_.header ? reader_.next() : true;
    for (; more; more = reader_.next()) {
      ++rows_;
      read_row();
    }
    TORCH_CHECK(rows_ > 0, reader_.path(), ": there is no row after the header");
    sort_categories();
  }

  at::Tensor features() && {
    return std::move(features_).to_tensor({rows_, static_cast<int64_t>(columns_.size())});
  }
  at::Tensor targets() && {
    if (!target_) return at::empty({rows_, 0}, at::TensorOptions().dtype(options_.dtype));
    return std::move(targets_).to_tensor({rows_});
  }
  std::vector<std::string> feature_names() const {
    std::vector<std::string> names;
    for (const LoadedColumn& column : columns_) names.push_back(column.name);
    return names;
  }
  CsvCategories categories() const { return sorted_; }

 private:
  void name_columns() {
    for (size_t i = 0; i < reader_.fields().size(); ++i) {
      names_.push_back(options_.header ? std::string(without_blanks(reader_.fields()[i]))
                                       : "column " + std::to_string(i));
    }
  }

  size_t position_of(const CsvColumn& column) const {
    if (std::holds_alternative<int64_t>(column)) {
      const int64_t position = std::get<int64_t>(column);
      TORCH_CHECK(position >= 0 && position < static_cast<int64_t>(names_.size()), reader_.path(),
                  ": there is no column ", position, "; the first row has ", names_.size(), " fields");
      return static_cast<size_t>(position);
    }
    TORCH_CHECK_VALUE(options_.header, reader_.path(), ": column ", name_of(column),
                      " is asked for by name, but CsvOptions.header is false; give its position");
    const auto found = std::find(names_.begin(), names_.end(), std::get<std::string>(column));
    TORCH_CHECK(found != names_.end(), reader_.path(), ": there is no column ", name_of(column),
                "; the header has ", header_text());
    TORCH_CHECK(std::find(found + 1, names_.end(), *found) == names_.end(), reader_.path(),
                ": the header has column ", name_of(column), " twice; give its position");
    return static_cast<size_t>(found - names_.begin());
  }

  std::string header_text() const {
    constexpr size_t kMostNames = 50;
    std::string text;
    for (size_t i = 0; i < std::min(names_.size(), kMostNames); ++i)
      text += (i == 0 ? "'" : ", '") + names_[i] + "'";
    return names_.size() > kMostNames ? text + ", …" : text;
  }

  void choose_columns() {
    std::map<size_t, bool> wanted;  // columns of categories: were they asked for as a feature or target?
    for (const CsvColumn& column : options_.categories) wanted[position_of(column)] = false;
    const auto make = [&](size_t position) {
      LoadedColumn column{position, names_[position], nullptr};
      if (const auto found = wanted.find(position); found != wanted.end()) {
        found->second = true;
        column.categories = &category_columns_[position];
        load_known(*column.categories, column.name);
      }
      return column;
    };
    if (options_.target) target_ = make(position_of(*options_.target));
    for (const CsvColumn& column : options_.features) columns_.push_back(make(position_of(column)));
    if (options_.features.empty()) {
      for (size_t i = 0; i < names_.size(); ++i) {
        if (!target_ || i != target_->position) columns_.push_back(make(i));
      }
    }
    TORCH_CHECK(!columns_.empty(), reader_.path(), ": there is no column of features beside the target");
    for (const auto& [position, used] : wanted) {
      TORCH_CHECK_VALUE(used, reader_.path(), ": column '", names_[position],
                        "' is named in CsvOptions.categories, and is neither a feature nor the target");
    }
  }

  void load_known(CategoryColumn& column, const std::string& name) {
    const auto known = options_.known_categories.find(name);
    if (known == options_.known_categories.end() || column.known) return;
    column.known = true;
    for (const std::string& word : known->second) {
      column.codes.emplace(word, static_cast<int64_t>(column.codes.size()));
    }
  }

  void read_row() {
    const auto& fields = reader_.fields();
    TORCH_CHECK(fields.size() == names_.size(), reader_.path(), ", row ", rows_, " (line ", reader_.line(),
                "): ", fields.size(), " fields, and the first row has ", names_.size());
    for (const LoadedColumn& column : columns_) {
      features_.append(
          column.categories != nullptr ? static_cast<double>(code_of(column)) : number_of<double>(column),
          reader_.path());
    }
    if (!target_) return;
    if (target_->categories != nullptr) {
      targets_.append(static_cast<double>(code_of(*target_)), reader_.path());
    } else if (target_dtype_ == at::kLong) {
      targets_.append_integer(number_of<int64_t>(*target_), reader_.path());
    } else {
      targets_.append(number_of<double>(*target_), reader_.path());
    }
  }

  std::string place(const LoadedColumn& column) const {
    return reader_.path() + ", row " + std::to_string(rows_) + " (line " + std::to_string(reader_.line()) +
           "), column '" + column.name + "'";
  }

  template <class T>
  T number_of(const LoadedColumn& column) const {
    const std::string_view text = without_blanks(reader_.fields()[column.position]);
    const auto& missing = options_.missing_values;
    if (text.empty() || std::find(missing.begin(), missing.end(), text) != missing.end()) {
      TORCH_CHECK(options_.fill_value, place(column),
                  ": the value is missing; CsvOptions.fill_value says what to take instead");
      if constexpr (std::is_integral_v<T>) {
        TORCH_CHECK_VALUE(*options_.fill_value == std::trunc(*options_.fill_value) &&
                              std::abs(*options_.fill_value) < 0x1p63,
                          place(column), ": the value is missing, and CsvOptions.fill_value (",
                          *options_.fill_value, ") is no integer, as target_dtype wants it");
      }
      return static_cast<T>(*options_.fill_value);
    }
    const std::optional<T> value = parse<T>(text);
    TORCH_CHECK(value, place(column), ": '", text.substr(0, 100), "' is not ",
                std::is_same_v<T, double> ? "a number" : "an integer of 64 bits",
                "; CsvOptions.categories takes columns of strings, and missing_values what stands for none");
    return *value;
  }

  int64_t code_of(const LoadedColumn& column) {
    auto& codes = column.categories->codes;
    std::string word(reader_.fields()[column.position]);
    if (column.categories->known) {
      const auto found = codes.find(word);
      TORCH_CHECK(found != codes.end(), place(column), ": '", word.substr(0, 100),
                  "' is not among CsvOptions.known_categories");
      return found->second;
    }
    const auto [entry, added] = codes.try_emplace(std::move(word), static_cast<int64_t>(codes.size()));
    if (added) count_category(entry->first.size());
    TORCH_CHECK(codes.size() <= kMostCategories, reader_.path(), ": column '", column.name,
                "' has more than 2^24 different strings, which float32 can't number");
    return entry->second;
  }

  /// Looks at the memory whenever the strings have doubled.
  void count_category(size_t length) {
    constexpr size_t kEntryBytes = 64;
    category_bytes_ += length + kEntryBytes;
    if (category_bytes_ < next_check_) return;
    next_check_ = 2 * category_bytes_;
    check_fits(static_cast<int64_t>(category_bytes_), reader_.path());
  }

  void sort_categories() {
    for (auto& [position, column] : category_columns_) {
      std::vector<std::string> words(column.codes.size());
      for (const auto& [word, code] : column.codes) words[static_cast<size_t>(code)] = word;
      if (!column.known) {
        std::vector<int64_t> order(words.size());  // codes, by their words
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
          return words[static_cast<size_t>(a)] < words[static_cast<size_t>(b)];
        });
        std::vector<int64_t> meaning(words.size());
        for (size_t i = 0; i < order.size(); ++i) {
          meaning[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
        }
        for (size_t i = 0; i < columns_.size(); ++i) {
          if (columns_[i].position == position) features_.translate(i, columns_.size(), meaning);
        }
        if (target_ && target_->position == position) targets_.translate(0, 1, meaning);
        std::sort(words.begin(), words.end());
      }
      sorted_[names_[position]] = std::move(words);
    }
  }

  const CsvOptions& options_;
  CsvReader reader_;
  at::ScalarType target_dtype_;
  std::vector<std::string> names_;
  std::vector<LoadedColumn> columns_;
  std::optional<LoadedColumn> target_;
  std::map<size_t, CategoryColumn> category_columns_;  // a map: its elements stay where they are
  NumberBuffer features_;
  NumberBuffer targets_;
  int64_t rows_ = 0;
  size_t category_bytes_ = 0;
  size_t next_check_ = 1 << 20;
  CsvCategories sorted_;
};

}  // namespace

CsvDataset::CsvDataset(const std::string& path, const CsvOptions& options) {
  CsvLoader loader(path, options);
  loader.read();
  feature_names_ = loader.feature_names();
  categories_ = loader.categories();
  targets_ = std::move(loader).targets();
  features_ = std::move(loader).features();
}

Example CsvDataset::get(int64_t index) const {
  TORCH_CHECK_INDEX(index >= 0 && index < size(), "index ", index, " is out of range for a CsvDataset with ",
                    size(), " rows");
  return {features_[index], targets_[index]};
}

Example CsvDataset::get_batch(std::span<const int64_t> indices) const {
  for (const int64_t index : indices) {
    TORCH_CHECK_INDEX(index >= 0 && index < size(), "index ", index,
                      " is out of range for a CsvDataset with ", size(), " rows");
  }
  const at::Tensor rows = at::tensor(at::IntArrayRef(indices.data(), indices.size()), at::kLong);
  return {features_.index_select(0, rows), targets_.index_select(0, rows)};
}

}  // namespace lockstep::data
