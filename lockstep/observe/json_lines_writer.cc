#include <string>
#include <utility>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/text/json_number.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/observe/internal/wall_time.h>
#include <lockstep/observe/json_lines_writer.h>

namespace lockstep {
namespace {

using nlohmann::json;

json to_json(double value) {
  return json_number(value, NumberWords::kProtobuf);
}
json to_json(bool value) {
  return value;
}
json to_json(int64_t value) {
  return value;
}
json to_json(const std::string& value) {
  return value;
}

std::string to_line(json object) {
  object["wall_time"] = observe::internal::wall_time();
  // Bytes that are no UTF-8 become U+FFFD: a name must not stop a training.
  return json_text(object) + "\n";
}

constexpr size_t kMostShown = 200;  // of a line that is none of ours

/// Whether a JsonLinesWriter has written a file's first line, or a part of it before its machine crashed.
bool is_own(const AppendFile::Line& first) {
  const json object = json::parse(first.text, nullptr, /*allow_exceptions=*/false);
  // A part of an object is no JSON; a whole one may be a file of others without a newline.
  if (first.ended || !object.is_discarded()) return object.is_object() && object.contains("wall_time");
  for (const std::string begin :
       {R"({"metrics":{)", R"({"hyperparameters":{)", R"({"artifact":")", R"({"status":")"}) {
    if (first.text.starts_with(begin) || begin.starts_with(first.text)) return true;
  }
  return false;
}

}  // namespace

JsonLinesWriter::JsonLinesWriter(std::filesystem::path file, JsonLinesWriterOptions options)
    : rank_(options.writes), file_("JsonLinesWriter", std::move(file), AppendFile::Kind::kLines) {}

/// Finds out whose file it is. False when the disk won't.
bool JsonLinesWriter::prepare() {
  if (prepared_) return true;
  if (!file_.open()) return false;
  const auto first = file_.first_line();
  TORCH_CHECK_VALUE(!first || is_own(*first), "JsonLinesWriter: ", file_.path().string(), " begins with '",
                    first->text.substr(0, kMostShown),
                    "', so a JsonLinesWriter has not written it; give it another path");
  prepared_ = file_.take_over();
  return prepared_;
}

/// What the disk refuses is counted, and so is what finds no file, or one with a half line that stays.
void JsonLinesWriter::append(const std::string& line) {
  if (!prepare() || !file_.append(line)) ++lost_;
}

void JsonLinesWriter::log_metrics(const Metrics& metrics, int64_t step) {
  if (!rank_.here()) return;
  json values = json::object();
  for (const auto& [name, value] : metrics) values[name] = to_json(value);
  const std::string line = to_line({{"metrics", std::move(values)}, {"step", step}});
  const std::lock_guard lock(mutex_);
  append(line);
}

void JsonLinesWriter::log_hyperparameters(const Hyperparameters& hyperparameters) {
  if (!rank_.here()) return;
  json values = json::object();
  for (const auto& [name, value] : hyperparameters) {
    values[name] = std::visit([](const auto& known) { return to_json(known); }, value);
  }
  const std::string line = to_line({{"hyperparameters", std::move(values)}});
  const std::lock_guard lock(mutex_);
  append(line);
}

void JsonLinesWriter::log_artifact(const std::filesystem::path& file) {
  if (!rank_.here()) return;
  const std::string line = to_line({{"artifact", file.string()}});
  const std::lock_guard lock(mutex_);
  append(line);
}

void JsonLinesWriter::resume(int64_t next_step) {
  if (!rank_.here()) return;
  const std::lock_guard lock(mutex_);
  if (!prepare()) return;
  file_.rewrite_lines([&](std::string_view line) -> std::optional<std::string> {
    const json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool is_metrics = object.is_object() && object.contains("step") && object["step"].is_number();
    if (is_metrics && object["step"].get<int64_t>() >= next_step) return std::nullopt;
    return std::string(line);
  });
}

void JsonLinesWriter::flush() {
  const std::lock_guard lock(mutex_);
  file_.sync();
}

void JsonLinesWriter::finalize(std::string_view status) {
  if (!rank_.here()) return;
  const std::string line = to_line({{"status", std::string(status)}});
  const std::lock_guard lock(mutex_);
  append(line);
  file_.sync();
}

int64_t JsonLinesWriter::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

}  // namespace lockstep
