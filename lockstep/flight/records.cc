#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>
#include <sys/stat.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/text/json_text.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/flight/records.h>

namespace lockstep::flight {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kFormat = "lockstep-flight";
constexpr int kMajorVersion = 1;
constexpr const char* kVersion = "1.0";
constexpr const char* kPrefix = "lockstep:";
constexpr int64_t kMaxBytes = 64 << 20;
constexpr int64_t kMaxWorld = 1 << 20;
// Of a whole file: bounds the memory that a hostile one can make us use. A real entry has fewer than 60.
constexpr int64_t kMaxValues = kMaxEntries * 100;
constexpr int kMaxDepth = 6;
constexpr std::array<const char*, 4> kStates = {"scheduled", "started", "completed", "failed"};

// --- writing

ordered_json to_json(const RankRecord& record, const Entry& entry) {
  const GroupRecord& group = record.groups.at(static_cast<size_t>(entry.group));
  // Times since 1970, as PyTorch writes them; the reader turns them back by the two clocks in the file.
  const int64_t epoch = record.realtime_ns - record.monotonic_ns;
  const auto when = [&](int64_t ns) { return ns == 0 ? ordered_json() : ordered_json(ns + epoch); };
  ordered_json result;
  result["record_id"] = entry.record_id;
  result["pg_id"] = entry.group;
  result["process_group"] = {group.key, group.name};
  result["collective_seq_id"] = entry.point_to_point ? 0 : entry.sequence;
  result["p2p_seq_id"] = entry.point_to_point ? entry.sequence : 0;
  result["is_p2p"] = entry.point_to_point;
  result["profiling_name"] = kPrefix + entry.operation;
  result["detail"] = entry.detail;
  result["peer"] = entry.peer;
  result["tag"] = entry.tag;
  result["async_op"] = entry.asynchronous;
  result["input_sizes"] = entry.inputs.sizes;
  result["input_dtypes"] = entry.inputs.dtypes;
  result["output_sizes"] = entry.outputs.sizes;
  result["output_dtypes"] = entry.outputs.dtypes;
  result["state"] = to_string(entry.state);
  result["time_created_ns"] = when(entry.created_ns);
  result["time_discovered_started_ns"] = when(entry.started_ns);
  result["time_discovered_completed_ns"] = when(entry.ended_ns);
  result["timeout_ms"] = entry.timeout_ms;
  result["error"] = entry.error;
  result["frames"] =
      ordered_json::array({{{"name", entry.function}, {"filename", entry.file}, {"line", entry.line}}});
  if (!entry.purpose.empty()) result["purpose"] = entry.purpose;
  return result;
}

ordered_json header_of(const RankRecord& record) {
  ordered_json header;
  header["format"] = kFormat;
  header["version"] = kVersion;
  header["rank"] = record.rank;
  header["world_size"] = record.world_size;
  header["pid"] = record.pid;
  header["host"] = record.host;
  header["boot_id"] = record.boot_id;
  header["program"] = record.program;
  header["reason"] = record.reason;
  header["realtime_ns"] = record.realtime_ns;
  header["monotonic_ns"] = record.monotonic_ns;
  header["loaded_ns"] = record.loaded_ns;
  header["overwritten"] = record.overwritten;
  ordered_json groups = ordered_json::object();
  for (size_t i = 0; i < record.groups.size(); ++i) {
    const GroupRecord& group = record.groups[i];
    ordered_json& json = groups[std::to_string(i)];
    json = {{"name", group.key}, {"desc", group.name}, {"ranks", group.ranks}};
    if (!group.hosts.empty()) json["hosts"] = group.hosts;
  }
  header["pg_config"] = std::move(groups);
  return header;
}

// --- reading

/// Messages quote what the file holds, and may be written to a terminal.
std::string printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c >= 0x7f; }, '?');
  return text;
}

/// One value of a file, and where it stands: "entries[3].peer". Every access checks the type and the range.
class Value {
 public:
  Value(const json& value, const std::string& name, std::string place)
      : value_(value), name_(name), place_(std::move(place)) {}

  Value at(const char* field) const {
    if (!value_.is_object()) fail("is not an object");
    const auto found = value_.find(field);
    const std::string place = place_.empty() ? field : place_ + "." + field;
    if (found == value_.end()) Value(value_, name_, place).fail("is missing");
    return {*found, name_, place};
  }
  Value at(size_t index) const {
    return {value_.at(index), name_, place_ + "[" + std::to_string(index) + "]"};
  }
  size_t list_size(size_t most) const {
    if (!value_.is_array()) fail("is not a list");
    if (value_.size() > most)
      fail("has " + std::to_string(value_.size()) + " elements, more than " + std::to_string(most));
    return value_.size();
  }

  int64_t integer(int64_t low, int64_t high) const {
    // Through unsigned: what lies beyond int64_t must not wrap around into the range.
    const bool fits =
        value_.is_number_unsigned()
            ? value_.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
            : value_.is_number_integer();
    if (!fits || value_.get<int64_t>() < low || value_.get<int64_t>() > high) {
      fail("is not a whole number from " + std::to_string(low) + " to " + std::to_string(high));
    }
    return value_.get<int64_t>();
  }
  uint64_t count() const { return static_cast<uint64_t>(integer(0, std::numeric_limits<int64_t>::max())); }
  /// Nanoseconds since 1970 or since boot; sums and differences of two of them don't overflow.
  int64_t time() const { return integer(0, std::numeric_limits<int64_t>::max() / 4); }
  std::optional<int64_t> time_or_none() const {
    return value_.is_null() ? std::nullopt : std::optional<int64_t>(time());
  }
  bool boolean() const {
    if (!value_.is_boolean()) fail("is neither true nor false");
    return value_.get<bool>();
  }
  std::string text() const {
    if (!value_.is_string()) fail("is not a text");
    return value_.get<std::string>();
  }
  const json& raw() const { return value_; }

  [[noreturn]] void fail(const std::string& what) const {
    const std::string place = place_.empty() ? "it" : place_;
    C10_THROW_ERROR(ValueError, name_ + ": not a flight record: " + printable(place + " " + what));
  }

 private:
  const json& value_;
  const std::string& name_;
  std::string place_;
};

/// Parses with a bound on nesting and on the number of values.
json parse_bounded(std::string_view text, const std::string& name) {
  int64_t values = 0;
  const auto bound = [&](int depth, json::parse_event_t, const json&) {
    TORCH_CHECK_VALUE(depth <= kMaxDepth, name, ": not a flight record: nested more than ", kMaxDepth,
                      " deep");
    TORCH_CHECK_VALUE(++values <= kMaxValues, name, ": not a flight record: more than ", kMaxValues,
                      " values");
    return true;
  };
  try {
    return json::parse(text, bound);
  } catch (const json::exception& error) {
    C10_THROW_ERROR(ValueError, name + ": not a flight record, or cut off: " + printable(error.what()));
  }
}

GroupRecord group_of(const Value& value, const RankRecord& record) {
  GroupRecord group;
  group.key = value.at("name").text();
  group.name = value.at("desc").text();
  const Value ranks = value.at("ranks");
  std::set<int> seen;
  for (size_t i = 0; i < ranks.list_size(static_cast<size_t>(record.world_size)); ++i) {
    group.ranks.push_back(static_cast<int>(ranks.at(i).integer(0, record.world_size - 1)));
    if (!seen.insert(group.ranks.back()).second) ranks.at(i).fail("is given twice");
  }
  if (!seen.contains(record.rank)) ranks.fail("don't contain this rank");
  if (!value.raw().contains("hosts")) return group;
  const Value hosts = value.at("hosts");
  if (hosts.list_size(group.ranks.size()) != group.ranks.size()) hosts.fail("is not as long as ranks");
  for (size_t i = 0; i < group.ranks.size(); ++i) group.hosts.push_back(hosts.at(i).text());
  return group;
}

std::vector<GroupRecord> groups_of(const Value& config, const RankRecord& record) {
  std::vector<GroupRecord> groups;
  if (!config.raw().is_object()) config.fail("is not an object");
  for (size_t i = 0; i < config.raw().size(); ++i) {  // the keys must be 0, 1, 2 …
    groups.push_back(group_of(config.at(std::to_string(i).c_str()), record));
  }
  return groups;
}

Tensors tensors_of(const Value& entry, const char* sizes_field, const char* dtypes_field) {
  constexpr size_t kMaxTensors = 4096;
  constexpr size_t kMaxDims = 64;
  Tensors tensors;
  const Value sizes = entry.at(sizes_field);
  const Value dtypes = entry.at(dtypes_field);
  const size_t count = sizes.list_size(kMaxTensors);
  if (dtypes.list_size(kMaxTensors) != count) dtypes.fail(std::string("is not as long as ") + sizes_field);
  for (size_t i = 0; i < count; ++i) {
    const Value one = sizes.at(i);
    std::vector<int64_t> dims(one.list_size(kMaxDims));
    for (size_t dim = 0; dim < dims.size(); ++dim) {
      dims[dim] = one.at(dim).integer(0, std::numeric_limits<int64_t>::max());
    }
    tensors.sizes.push_back(std::move(dims));
    tensors.dtypes.push_back(dtypes.at(i).text());
  }
  return tensors;
}

State state_of(const Value& value) {
  const std::string text = value.text();
  const auto found = std::find(kStates.begin(), kStates.end(), text);
  if (found == kStates.end())
    value.fail("is '" + text + "'; it takes scheduled, started, completed or failed");
  return static_cast<State>(found - kStates.begin());
}

void read_times(const Value& value, const RankRecord& record, Entry& entry) {
  const int64_t epoch = record.realtime_ns - record.monotonic_ns;
  const auto monotonic = [&](int64_t ns) { return std::max<int64_t>(ns - epoch, 1); };  // 0 means never
  entry.created_ns = monotonic(value.at("time_created_ns").time());
  if (auto ns = value.at("time_discovered_started_ns").time_or_none()) entry.started_ns = monotonic(*ns);
  if (auto ns = value.at("time_discovered_completed_ns").time_or_none()) {
    entry.ended_ns = monotonic(*ns);
  } else if (!entry.pending()) {
    value.at("time_discovered_completed_ns")
        .fail(std::string("is missing, though it ") + to_string(entry.state));
  }
}

Entry entry_of(const Value& value, const RankRecord& record) {
  if (record.groups.empty()) value.fail("has no group: pg_config is empty");
  Entry entry;
  entry.record_id = value.at("record_id").count();
  entry.group =
      static_cast<int>(value.at("pg_id").integer(0, static_cast<int64_t>(record.groups.size()) - 1));
  entry.operation = value.at("profiling_name").text();
  if (entry.operation.starts_with(kPrefix)) entry.operation.erase(0, std::strlen(kPrefix));
  entry.detail = value.at("detail").text();
  entry.point_to_point = value.at("is_p2p").boolean();
  entry.sequence = value.at(entry.point_to_point ? "p2p_seq_id" : "collective_seq_id").count();
  const auto members = static_cast<int64_t>(record.groups[static_cast<size_t>(entry.group)].ranks.size());
  entry.peer = static_cast<int>(value.at("peer").integer(-1, members - 1));
  entry.tag = static_cast<int>(
      value.at("tag").integer(std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
  entry.asynchronous = value.at("async_op").boolean();
  entry.inputs = tensors_of(value, "input_sizes", "input_dtypes");
  entry.outputs = tensors_of(value, "output_sizes", "output_dtypes");
  entry.state = state_of(value.at("state"));
  read_times(value, record, entry);
  entry.timeout_ms = value.at("timeout_ms")
                         .integer(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  entry.error = value.at("error").text();
  const Value frames = value.at("frames");
  if (frames.list_size(1024) > 0) {
    entry.file = frames.at(size_t{0}).at("filename").text();
    entry.line = frames.at(size_t{0}).at("line").integer(0, std::numeric_limits<int32_t>::max());
    entry.function = frames.at(size_t{0}).at("name").text();
  }
  if (value.raw().contains("purpose")) entry.purpose = value.at("purpose").text();
  return entry;
}

void check_version(const Value& file) {
  if (file.at("format").text() != kFormat) file.at("format").fail(std::string("is not '") + kFormat + "'");
  const std::string version = file.at("version").text();
  int major = 0;
  const auto [stop, error] = std::from_chars(version.data(), version.data() + version.size(), major);
  if (error != std::errc() || stop == version.data() + version.size() || *stop != '.') {
    file.at("version").fail("is '" + version + "', which is not a version");
  }
  if (major != kMajorVersion) {
    file.at("version").fail("is '" + version + "', and this program reads " + kVersion +
                            "; read it with the `lockstep` of the version that wrote it");
  }
}

/// The number in "rank_<number>.json"; nothing for other names.
std::optional<int> rank_in(const std::string& name) {
  constexpr std::string_view kStart = "rank_";
  constexpr std::string_view kEnd = ".json";
  if (!name.starts_with(kStart) || !name.ends_with(kEnd)) return std::nullopt;
  const auto rank = parse_number<int>(
      std::string_view(name).substr(kStart.size(), name.size() - kStart.size() - kEnd.size()));
  return rank && *rank >= 0 ? rank : std::nullopt;
}

/// The records' files of a directory, by rank.
void add_files(const std::string& path, std::map<int, std::string>& files) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error)) {
    const auto rank = rank_in(entry->path().filename().string());
    if (!rank) continue;
    const auto [known, fresh] = files.emplace(*rank, entry->path().string());
    TORCH_CHECK_VALUE(fresh, known->second, " and ", entry->path().string(), " are both of rank ", *rank,
                      "; leave one out");
  }
  TORCH_CHECK_VALUE(!error, path, ": can't be read: ", error.message(),
                    "; give the directory that the program named when it wrote its flight record");
}

}  // namespace

const char* to_string(State state) {
  return kStates.at(static_cast<size_t>(state));
}

std::string file_name(int rank) {
  return "rank_" + std::to_string(rank) + ".json";
}

std::string to_json(const RankRecord& record) {
  const ordered_json header = header_of(record);
  std::string text = "{\n";
  for (const auto& [field, value] : header.items()) {
    text += json_text<json>(field) + ": " + json_text(value) + ",\n";
  }
  text += "\"entries\": [";
  for (size_t i = 0; i < record.entries.size(); ++i) {
    text += (i > 0 ? ",\n" : "\n") + json_text(to_json(record, record.entries[i]));
  }
  return text + "\n]\n}\n";
}

RankRecord parse(std::string_view text, const std::string& name) {
  const json parsed = parse_bounded(text, name);
  const Value file(parsed, name, "");
  check_version(file);
  RankRecord record;
  record.world_size = static_cast<int>(file.at("world_size").integer(1, kMaxWorld));
  record.rank = static_cast<int>(file.at("rank").integer(0, record.world_size - 1));
  record.pid = file.at("pid").integer(0, std::numeric_limits<int32_t>::max());
  record.host = file.at("host").text();
  record.boot_id = file.at("boot_id").text();
  record.program = file.at("program").text();
  record.reason = file.at("reason").text();
  record.realtime_ns = file.at("realtime_ns").time();
  record.monotonic_ns = file.at("monotonic_ns").integer(0, record.realtime_ns);
  record.loaded_ns = file.at("loaded_ns").time();
  record.overwritten = file.at("overwritten").count();
  record.groups = groups_of(file.at("pg_config"), record);
  const Value entries = file.at("entries");
  const size_t count = entries.list_size(kMaxEntries);
  record.entries.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    record.entries.push_back(entry_of(entries.at(i), record));
    const bool rising = i == 0 || record.entries[i - 1].record_id < record.entries[i].record_id;
    if (!rising) entries.at(i).at("record_id").fail("does not rise");
  }
  return record;
}

RankRecord read_file(const std::string& path) {
  // Without O_NONBLOCK a named pipe would hold us here.
  UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  TORCH_CHECK_VALUE(file, path, ": can't be opened: ", std::strerror(errno));
  struct stat status {};
  TORCH_CHECK_VALUE(::fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode), path,
                    ": not a flight record: it is no regular file");
  TORCH_CHECK_VALUE(status.st_size <= kMaxBytes, path, ": not a flight record: it has ", status.st_size,
                    " bytes, more than ", kMaxBytes);
  std::string text(static_cast<size_t>(status.st_size), '\0');
  size_t have = 0;
  while (have < text.size()) {
    const ssize_t got = ::read(file.get(), text.data() + have, text.size() - have);
    TORCH_CHECK_VALUE(got >= 0 || errno == EINTR, path, ": can't be read: ", std::strerror(errno));
    if (got == 0) break;
    if (got > 0) have += static_cast<size_t>(got);
  }
  text.resize(have);
  return parse(text, path);
}

std::vector<RankRecord> read_directories(const std::vector<std::string>& paths) {
  std::map<int, std::string> files;
  for (const std::string& path : paths) add_files(path, files);
  TORCH_CHECK_VALUE(!files.empty(), c10::Join(", ", paths), paths.size() == 1 ? " holds" : " hold",
                    " no flight records (rank_0.json, …); they are written on a timeout, on abort and on "
                    "SIGUSR1, and the program's log says where");
  std::vector<RankRecord> records;
  for (const auto& [rank, file] : files) {
    records.push_back(read_file(file));
    TORCH_CHECK_VALUE(records.back().rank == rank, file, ": holds the record of rank ", records.back().rank,
                      "; rename it to ", file_name(records.back().rank));
  }
  return records;
}

}  // namespace lockstep::flight
