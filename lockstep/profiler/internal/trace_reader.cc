#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <utility>
#include <zlib.h>

#include <c10/util/Exception.h>

#include <lockstep/profiler/internal/trace_names.h>
#include <lockstep/profiler/internal/trace_reader.h>

namespace lockstep::profiler::internal {
namespace {

using nlohmann::json;

constexpr size_t kMostOfAValue = size_t{16} << 20;
constexpr int kMostDepth = 64;
constexpr int kEndOfFile = -1;
constexpr int64_t kMostRank = 1 << 20;

bool is_blank(int c) {
  return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

}  // namespace

struct TraceReader::File {
  gzFile handle = nullptr;
  std::vector<unsigned char> block = std::vector<unsigned char>(size_t{1} << 20);
  size_t at = 0;
  size_t end = 0;
};

TraceReader::TraceReader(std::string path) : path_(std::move(path)), file_(std::make_unique<File>()) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path_, error)) refuse("it is no file");
  file_->handle = ::gzopen(path_.c_str(), "rb");
  if (file_->handle == nullptr) refuse(std::strerror(errno));
  try {
    if (get_token() != '{') refuse("it begins with no object");
    for (int c = get_token(); c != '}'; c = get_token()) {
      if (c == ',') continue;
      if (c != '"') refuse("it has a field without a name");
      const json name = parsed(read_value(c));
      if (get_token() != ':') refuse("it has a field without a value");
      c = get_token();
      if (name == "traceEvents") {
        if (c != '[') refuse("its traceEvents are no list");
        return;
      }
      header_[name.get<std::string>()] = parsed(read_value(c));
    }
    refuse("it has no traceEvents");
  } catch (...) {
    ::gzclose(file_->handle);
    throw;
  }
}

TraceReader::~TraceReader() {
  ::gzclose(file_->handle);
}

void TraceReader::refuse(const std::string& why) const {
  TORCH_CHECK_VALUE(false, path_, " is no trace that can be read: ", why);
}

int TraceReader::get() {
  if (file_->at == file_->end) {
    const int got = ::gzread(file_->handle, file_->block.data(), static_cast<unsigned>(file_->block.size()));
    if (got < 0) {
      int number = 0;
      refuse(::gzerror(file_->handle, &number));
    }
    file_->at = 0;
    file_->end = static_cast<size_t>(got);
    if (got == 0) return kEndOfFile;
  }
  return file_->block[file_->at++];
}

int TraceReader::get_token() {
  int c = get();
  while (is_blank(c)) c = get();
  if (c == kEndOfFile) refuse("it ends too early");
  return c;
}

/// The text of a value whose first character was read; nothing after the value is read.
std::string TraceReader::read_value(int first) {
  std::string text(1, static_cast<char>(first));
  const bool nested = first == '{' || first == '[';
  int depth = nested ? 1 : 0;
  bool quoted = first == '"', escaped = false;
  if (!nested && !quoted) {  // a number or a word
    for (;;) {
      const int c = get();
      if (c == kEndOfFile) refuse("it ends too early");
      if (c == ',' || c == '}' || c == ']' || is_blank(c)) {
        --file_->at;
        return text;
      }
      text += static_cast<char>(c);
      if (text.size() > kMostOfAValue) refuse("it has a value that is too long");
    }
  }
  while (depth > 0 || quoted) {
    const int c = get();
    if (c == kEndOfFile) refuse("it ends too early");
    text += static_cast<char>(c);
    if (text.size() > kMostOfAValue) refuse("it has a value that is too long");
    if (quoted) {
      quoted = escaped || c != '"';
      escaped = !escaped && c == '\\';
    } else if (c == '"') {
      quoted = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kMostDepth) refuse("its values are nested too deep");
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return text;
}

json TraceReader::parsed(const std::string& text) const {
  json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) refuse("it is no JSON at " + text.substr(0, 60));
  return value;
}

bool TraceReader::next(json& event) {
  while (!over_) {
    const int c = get_token();
    if (c == ']') {
      over_ = true;
    } else if (c == ',') {
      continue;
    } else if (c == '{') {
      event = parsed(read_value(c));
      return true;
    } else {
      refuse("it has an event that is no object");
    }
  }
  return false;
}

double number_of(const json& object, const char* key, double otherwise) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number()) return otherwise;
  const double value = found->get<double>();
  return std::isfinite(value) ? value : otherwise;
}

int64_t integer_of(const json& object, const char* key, int64_t otherwise) {
  constexpr double kMost = 9e18;
  const double value = number_of(object, key, static_cast<double>(otherwise));
  if (std::abs(value) > kMost) return otherwise;
  const auto found = object.find(key);
  if (found != object.end() && found->is_number_integer()) return found->get<int64_t>();
  return static_cast<int64_t>(value);
}

std::string text_of(const json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

const json& arguments_of(const json& event) {
  static const json none = json::object();
  const auto found = event.find("args");
  return found != event.end() && found->is_object() ? *found : none;
}

TraceOrigin origin_of(const TraceReader& reader) {
  const json& header = reader.header();
  TraceOrigin origin;
  if (const auto found = header.find("distributedInfo"); found != header.end() && found->is_object()) {
    origin.rank = integer_of(*found, "rank", -1);
    origin.world_size = integer_of(*found, "world_size", -1);
  }
  constexpr int64_t kMostBase = 4'000'000'000'000'000'000;  // a hundred years; sums of times don't overflow
  origin.base_ns = std::clamp<int64_t>(integer_of(header, "baseTimeNanoseconds"), 0, kMostBase);
  origin.host = text_of(header, "host_name");
  origin.clock = origin.host;
  if (const auto found = header.find(kProcessField); found != header.end() && found->is_object()) {
    origin.pid = integer_of(*found, "pid", -1);
    if (const std::string host = text_of(*found, "host"); !host.empty()) origin.host = host;
    if (const std::string boot = text_of(*found, "boot_id"); !boot.empty()) origin.clock = boot;
  }
  if (origin.rank >= kMostRank) origin.rank = -1;
  return origin;
}

void learn_process(TraceOrigin& origin, const json& event) {
  if (origin.pid < 0 && text_of(event, "name") == "process_name") origin.pid = integer_of(event, "pid", -1);
}

void learn_rank(TraceOrigin& origin, int64_t rank) {
  if (origin.rank < 0 && rank < kMostRank) origin.rank = rank;
}

std::vector<std::string> complete_ranks(const std::vector<TraceOrigin*>& origins) {
  using Process = std::pair<std::string, int64_t>;
  std::map<Process, int64_t> ranks;
  std::map<int64_t, std::set<Process>> processes;
  for (size_t i = 0; i < origins.size(); ++i) {
    TraceOrigin& origin = *origins[i];
    const Process process(origin.clock, origin.pid);
    if (origin.rank < 0) {
      const auto known = origin.pid < 0 ? ranks.end() : ranks.find(process);
      origin.rank = known == ranks.end() ? static_cast<int64_t>(i) : known->second;
    }
    if (origin.pid < 0) continue;
    ranks.emplace(process, origin.rank);
    processes[origin.rank].insert(process);
  }
  std::vector<std::string> notes;
  for (const auto& [rank, of_rank] : processes) {
    if (of_rank.size() < 2) continue;
    notes.push_back("rank " + std::to_string(rank) + " has traces of " + std::to_string(of_rank.size()) +
                    " processes: give each run a directory of its own");
  }
  return notes;
}

bool is_called_like_a_trace(const std::string& path) {
  const std::string name = std::filesystem::path(path).filename();
  return name.find(".pt.trace.json") != std::string::npos &&
         (name.ends_with(".json") || name.ends_with(".json.gz"));
}

std::vector<std::string> trace_files(const std::string& directory) {
  std::vector<std::string> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (is_called_like_a_trace(entry->path())) paths.push_back(entry->path());
  }
  TORCH_CHECK_VALUE(!error, directory, " can't be read: ", error.message());
  // A process's own name for a file that is being written has further words after these.
  std::erase_if(paths, [](const std::string& path) { return path.ends_with(".kineto.json"); });
  TORCH_CHECK_VALUE(!paths.empty(), directory,
                    " has no traces: files like HOST_PID.NANOSECONDS.pt.trace.json, as LOCKSTEP_PROFILE and "
                    "tensorboard_trace_handler() write them");
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace lockstep::profiler::internal
