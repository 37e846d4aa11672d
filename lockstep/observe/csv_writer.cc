#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/observe/csv_writer.h>
#include <lockstep/observe/internal/wall_time.h>

namespace lockstep {
namespace {

constexpr std::string_view kStep = "step";
constexpr std::string_view kWallTime = "wall_time";
constexpr std::string_view kHeader = "step,wall_time";  // how it begins
constexpr size_t kShown = 200;                          // of a line that is none of ours

/// As many digits as it takes to read the same number again.
std::string shortest(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value);
  return {text.data(), end.ptr};
}

std::string quoted(const std::string& field) {
  if (field.find_first_of(",\"") == std::string::npos) return field;
  std::string result = "\"";
  for (const char c : field) {
    if (c == '"') result += '"';
    result += c;
  }
  return result + '"';
}

/// The fields of a header.
std::vector<std::string> split(std::string_view line) {
  std::vector<std::string> fields(1);
  bool inside = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (c == '"' && inside && i + 1 < line.size() && line[i + 1] == '"') {
      fields.back() += line[++i];
    } else if (c == '"') {
      inside = !inside;
    } else if (c == ',' && !inside) {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  return fields;
}

void check_name(const std::string& name) {
  TORCH_CHECK_VALUE(name != kStep && name != kWallTime, "CsvWriter: a metric is called '", name,
                    "', which is a column of the table's own; give it another name");
  TORCH_CHECK_VALUE(name.find_first_of("\r\n") == std::string::npos, "CsvWriter: the metric '", name,
                    "' has a line break in its name; give it another name");
}

}  // namespace

CsvWriter::CsvWriter(std::filesystem::path file, CsvWriterOptions options)
    : rank_(options.writes),
      file_("CsvWriter", std::move(file), AppendFile::Kind::kLines),
      columns_(std::move(options.columns)) {
  for (const auto& name : columns_) check_name(name);
}

std::string CsvWriter::header() const {
  std::string line(kHeader);
  for (const auto& name : columns_) line += "," + quoted(name);
  return line;
}

/// Takes over the columns of a file that is there, or begins one. False when the disk won't.
bool CsvWriter::prepare() {
  if (prepared_) return true;
  if (!file_.open()) return false;
  const auto first = file_.first_line();
  const auto fields = first ? split(first->text) : std::vector<std::string>();
  const bool table = fields.size() >= 2 && fields[0] == kStep && fields[1] == kWallTime;
  // A machine that crashed may have left a part of the header and nothing else.
  const bool begun = !first || (!first->ended && (table || kHeader.starts_with(first->text)));
  TORCH_CHECK_VALUE(table || begun, "CsvWriter: ", file_.path().string(), " begins with '",
                    first->text.substr(0, kShown),
                    "', so it is no table that a CsvWriter can continue; give it another path");
  if (!file_.take_over()) return false;
  if (begun) {
    if (!file_.append(header() + "\n")) return false;
  } else {
    Metrics wanted;
    for (const auto& name : columns_) wanted.emplace(name, 0.0);
    columns_.assign(fields.begin() + 2, fields.end());
    prepared_ = true;
    add_columns(wanted);
  }
  prepared_ = true;
  return true;
}

void CsvWriter::add_columns(const Metrics& metrics) {
  std::vector<std::string> columns = columns_;
  for (const auto& [name, value] : metrics) {
    if (std::find(columns_.begin(), columns_.end(), name) != columns_.end()) continue;
    check_name(name);
    columns.push_back(name);
  }
  const size_t added = columns.size() - columns_.size();
  if (added == 0) return;
  columns_.swap(columns);
  bool in_header = true;
  const bool done = file_.rewrite_lines([&](std::string_view line) -> std::optional<std::string> {
    return std::exchange(in_header, false) ? header() : std::string(line) + std::string(added, ',');
  });
  if (!done) columns_.swap(columns);  // the new metrics have no place until the disk takes them
}

void CsvWriter::log_metrics(const Metrics& metrics, int64_t step) {
  if (!rank_.here()) return;
  const std::lock_guard lock(mutex_);
  if (!prepare()) {
    ++lost_;
    return;
  }
  add_columns(metrics);
  std::string row = std::to_string(step) + "," + shortest(observe::internal::wall_time());
  for (const auto& name : columns_) {
    row += ',';
    if (const auto found = metrics.find(name); found != metrics.end()) row += shortest(found->second);
  }
  row += '\n';
  if (!file_.append(row)) ++lost_;
}

void CsvWriter::resume(int64_t next_step) {
  if (!rank_.here()) return;
  const std::lock_guard lock(mutex_);
  if (!prepare()) return;
  bool in_header = true;
  file_.rewrite_lines([&](std::string_view line) -> std::optional<std::string> {
    int64_t step = 0;
    if (!std::exchange(in_header, false) &&
        std::from_chars(line.data(), line.data() + line.size(), step).ec == std::errc() &&
        step >= next_step) {
      return std::nullopt;
    }
    return std::string(line);
  });
}

void CsvWriter::flush() {
  const std::lock_guard lock(mutex_);
  file_.sync();
}

void CsvWriter::finalize(std::string_view /*status*/) {
  flush();
}

int64_t CsvWriter::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

}  // namespace lockstep
