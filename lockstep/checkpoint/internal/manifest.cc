#include <cinttypes>
#include <ctime>
#include <limits>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/base/text/formatted.h>
#include <lockstep/base/text/json_number.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/checkpoint/internal/checksum.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/internal/manifest.h>
#include <lockstep/serialization/safetensors_header.h>

namespace lockstep::checkpoint::internal {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kFormat = "lockstep-checkpoint";
constexpr const char* kFormatMember = "\"format\": \"lockstep-checkpoint\"";  // as to_text() writes it
constexpr int64_t kVersion = 2;                                               // 1 had no parts of tensors
constexpr const char* kBeforeChecksum = ",\n\"checksum\": \"";
constexpr const char* kAfterChecksum = "\"\n}\n";
constexpr size_t kChecksumDigits = 32;
constexpr int kMaxDepth = 5;

// --- writing

int64_t to_microseconds(std::chrono::system_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count();
}

template <class Record, class Write>
std::string lines(const std::vector<Record>& records, const Write& write) {
  std::string text = "[";
  for (const char* separator = "\n"; const Record& record : records) {
    text += separator + write(record);
    separator = ",\n";
  }
  return text + (records.empty() ? "]" : "\n]");
}

// --- reading

/// One value of the manifest, and where it stands. Every access checks kind and range.
class Value {
 public:
  Value(const json& value, const std::string& what, std::string place)
      : value_(value), what_(what), place_(std::move(place)) {}

  Value at(const char* field) const {
    if (!value_.is_object()) fail("is no object");
    const auto found = value_.find(field);
    const std::string place = place_.empty() ? field : place_ + "." + field;
    if (found == value_.end()) Value(value_, what_, place).fail("is missing");
    return {*found, what_, place};
  }
  bool has(const char* field) const { return value_.is_object() && value_.contains(field); }
  std::vector<int64_t> integers() const {
    std::vector<int64_t> numbers;
    each([&](const Value& number) { numbers.push_back(number.integer()); });
    return numbers;
  }
  int64_t integer(int64_t low = 0, int64_t high = std::numeric_limits<int64_t>::max()) const {
    const bool fits = value_.is_number_unsigned() ? value_.get<uint64_t>() <= static_cast<uint64_t>(high)
                                                  : value_.is_number_integer();
    if (!fits || value_.get<int64_t>() < low || value_.get<int64_t>() > high) {
      fail("is not a whole number from " + std::to_string(low) + " to " + std::to_string(high));
    }
    return value_.get<int64_t>();
  }
  bool boolean() const {
    if (!value_.is_boolean()) fail("is neither true nor false");
    return value_.get<bool>();
  }
  std::string text() const {
    if (!value_.is_string()) fail("is no string");
    return value_.get<std::string>();
  }
  std::string checksum() const {
    std::string hex = text();
    if (hex.size() != kChecksumDigits || hex.find_first_not_of("0123456789abcdef") != std::string::npos) {
      fail("is no checksum");
    }
    return hex;
  }
  double metric() const {
    if (value_.is_number()) return value_.get<double>();
    const std::string name = text();
    if (name == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (name == "inf") return std::numeric_limits<double>::infinity();
    if (name == "-inf") return -std::numeric_limits<double>::infinity();
    fail("is no number");
  }
  template <class Action>
  void each(const Action& action) const {
    if (!value_.is_array()) fail("is no list");
    for (size_t i = 0; i < value_.size(); ++i) {
      action(Value(value_[i], what_, place_ + "[" + std::to_string(i) + "]"));
    }
  }
  template <class Action>
  void each_member(const Action& action) const {
    if (!value_.is_object()) fail("is no object");
    for (const auto& [key, value] : value_.items())
      action(key, Value(value, what_, place_ + "." + printable(key)));
  }
  [[noreturn]] void fail(const std::string& problem) const {
    LOCKSTEP_CHECK_FILE(false, what_, " is damaged: ", place_.empty() ? "it" : place_, " ", problem);
  }

 private:
  const json& value_;
  const std::string& what_;
  std::string place_;
};

json parse_json(std::string_view text, const std::string& what) {
  const auto depth_bound = [&](int depth, json::parse_event_t, json&) {
    LOCKSTEP_CHECK_FILE(depth <= kMaxDepth, what, " is damaged: it is nested deeper than ", kMaxDepth,
                        " levels");
    return true;
  };
  try {
    return json::parse(text, depth_bound);
  } catch (const json::exception& error) {
    LOCKSTEP_CHECK_FILE(false, what, " is no JSON: ", printable(error.what()));
  }
}

/// A file's name, which must not lead out of the directory.
std::string file_name(const Value& value) {
  std::string name = value.text();
  if (name.empty() || name.front() == '.' || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos) {
    value.fail("is no name of a file in the same directory: '" + printable(name) + "'");
  }
  return name;
}

CheckpointInfo parse_info(const Value& value) {
  CheckpointInfo info;
  info.step = value.at("step").integer(std::numeric_limits<int64_t>::min());
  info.epoch = value.at("epoch").integer(std::numeric_limits<int64_t>::min());
  value.at("metrics").each_member(
      [&](const std::string& name, const Value& metric) { info.metrics[name] = metric.metric(); });
  info.emergency = value.at("emergency").text();
  info.world_size = value.at("world_size").integer(1);
  info.saved_at = std::chrono::system_clock::time_point(std::chrono::microseconds(
      value.at("saved_at_us").integer(0, std::numeric_limits<int64_t>::max() / 1000)));
  return info;
}

serialization::TensorPart parse_part(const Value& value, const std::vector<int64_t>& shape) {
  serialization::TensorPart part{.global_shape = value.at("global_shape").integers(),
                                 .offsets = value.at("offsets").integers(),
                                 .mesh_dim = value.at("mesh_dim").text()};
  if (!serialization::lies_within(part, shape)) value.at("offsets").fail("put the tensor beyond the whole");
  return part;
}

std::string part_text(const std::optional<serialization::TensorPart>& part) {
  if (!part) return "";
  return ", \"global_shape\": " + json(part->global_shape).dump() +
         ", \"offsets\": " + json(part->offsets).dump() +
         ", \"mesh_dim\": " + json_text<json>(part->mesh_dim);
}

TensorRecord parse_tensor(const Value& value, const std::map<std::string, int64_t>& files) {
  TensorRecord record;
  record.part = value.at("part").text();
  record.name = value.at("name").text();
  record.file = value.at("file").text();
  record.dtype = value.at("dtype").text();
  record.shape = value.at("shape").integers();
  record.offset = value.at("offset").integer();
  record.bytes = value.at("bytes").integer();
  record.checksum = value.at("xxh3_128").checksum();
  if (value.has("global_shape")) record.part_of = parse_part(value, record.shape);
  const auto file = files.find(record.file);
  if (file == files.end())
    value.at("file").fail("is not in the list of files: '" + printable(record.file) + "'");
  if (record.offset > file->second || record.bytes > file->second - record.offset) {
    value.at("bytes").fail("reaches beyond the end of " + printable(record.file));
  }
  return record;
}

}  // namespace

std::string rank_name(int64_t rank) {
  return formatted("rank%05" PRId64, rank);
}

std::string to_text(const Manifest& manifest) {
  const CheckpointInfo& info = manifest.info;
  ordered_json metrics = ordered_json::object();
  for (const auto& [name, value] : info.metrics) metrics[name] = json_number(value);
  std::string text = "{\n" + std::string(kFormatMember) + ",\n\"version\": " + std::to_string(kVersion);
  text += ",\n\"info\": {\"step\": " + std::to_string(info.step) +
          ", \"epoch\": " + std::to_string(info.epoch) + ", \"metrics\": " + json_text(metrics) +
          ", \"emergency\": " + json_text<json>(info.emergency) +
          ", \"world_size\": " + std::to_string(info.world_size) +
          ", \"saved_at_us\": " + std::to_string(to_microseconds(info.saved_at)) + "}";
  text += std::string(",\n\"managed\": ") + (manifest.managed ? "true" : "false");
  text += ",\n\"ranks\": " + json(manifest.ranks).dump();
  text += ",\n\"files\": " + lines(manifest.files, [](const FileRecord& file) {
            return "{\"name\": " + json_text<json>(file.name) + ", \"bytes\": " + std::to_string(file.bytes) +
                   ", \"xxh3_128\": \"" + file.checksum + "\"}";
          });
  text += ",\n\"tensors\": " + lines(manifest.tensors, [](const TensorRecord& tensor) {
            return "{\"part\": " + json_text<json>(tensor.part) +
                   ", \"name\": " + json_text<json>(tensor.name) +
                   ", \"file\": " + json_text<json>(tensor.file) + ", \"dtype\": \"" + tensor.dtype +
                   "\", \"shape\": " + json(tensor.shape).dump() +
                   ", \"offset\": " + std::to_string(tensor.offset) +
                   ", \"bytes\": " + std::to_string(tensor.bytes) + ", \"xxh3_128\": \"" + tensor.checksum +
                   "\"" + part_text(tensor.part_of) + "}";
          });
  return text + kBeforeChecksum + checksum_of(text) + kAfterChecksum;
}

Manifest parse_manifest(const std::string& text, const std::string& what) {
  const size_t tail =
      std::string_view(kBeforeChecksum).size() + kChecksumDigits + std::string_view(kAfterChecksum).size();
  LOCKSTEP_CHECK_FILE(text.size() >= tail && text.ends_with(kAfterChecksum), what,
                      " is damaged: it does not end with its checksum; it is truncated, or no manifest");
  const std::string_view body = std::string_view(text).substr(0, text.size() - tail);
  const std::string_view rest = std::string_view(text).substr(body.size());
  LOCKSTEP_CHECK_FILE(rest.starts_with(kBeforeChecksum), what,
                      " is damaged: it does not end with its checksum");
  const std::string_view claimed = rest.substr(std::string_view(kBeforeChecksum).size(), kChecksumDigits);
  LOCKSTEP_CHECK_FILE(checksum_of(body) == claimed, what, " is damaged: its checksum is wrong");

  const json tree = parse_json(text, what);
  const Value top(tree, what, "");
  LOCKSTEP_CHECK_FILE(top.at("format").text() == kFormat, what, " is no manifest of a checkpoint");
  const int64_t version = top.at("version").integer(1);
  LOCKSTEP_CHECK_FILE(version <= kVersion, what,
                      " was written by a newer version of Lockstep: its format is ", version,
                      ", and this one reads ", kVersion, "; read it with the newer one");
  Manifest manifest;
  manifest.info = parse_info(top.at("info"));
  manifest.managed = top.at("managed").boolean();
  top.at("ranks").each([&](const Value& rank) { manifest.ranks.push_back(rank.integer()); });
  std::map<std::string, int64_t> files;
  int64_t all_bytes = 0;
  top.at("files").each([&](const Value& value) {
    FileRecord file{file_name(value.at("name")), value.at("bytes").integer(),
                    value.at("xxh3_128").checksum()};
    if (!files.emplace(file.name, file.bytes).second) value.at("name").fail("is there twice");
    if (__builtin_add_overflow(all_bytes, file.bytes, &all_bytes)) value.at("bytes").fail("is too much");
    manifest.files.push_back(std::move(file));
  });
  std::set<std::pair<std::string, std::string>> names;
  top.at("tensors").each([&](const Value& value) {
    TensorRecord record = parse_tensor(value, files);
    if (!names.emplace(record.part, record.name).second) value.at("name").fail("is there twice");
    manifest.tensors.push_back(std::move(record));
  });
  return manifest;
}

Manifest read_manifest(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / kManifestName;
  Manifest manifest = parse_manifest(read_file(path, kMaxManifest), path.string());
  manifest.info.directory = directory;
  return manifest;
}

bool names_our_format(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / kManifestName;
  if (!internal::exists(path)) return false;
  try {
    return read_file(path, kMaxManifest).find(kFormatMember) != std::string::npos;
  } catch (const CheckpointIoError&) {
    throw;
  } catch (const CheckpointError&) {  // no regular file, or gone
    return false;
  }
}

}  // namespace lockstep::checkpoint::internal
