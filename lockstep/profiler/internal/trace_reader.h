#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

/// Traces of Kineto, ours and Python's, event by event: they are larger than what one wants to hold.
namespace lockstep::profiler::internal {

/// Reads a file from begin to end, plain or compressed by gzip. The file may be anything: what is no trace is refused, and
/// memory is bounded by the largest event. All throw c10::ValueError that begins with the file's name. Used by one thread.
class TraceReader {
 public:
  /// Reads up to the first event.
  explicit TraceReader(std::string path);
  TraceReader(const TraceReader&) = delete;
  TraceReader& operator=(const TraceReader&) = delete;
  ~TraceReader();

  const std::string& path() const { return path_; }
  /// The fields before the events.
  const nlohmann::json& header() const { return header_; }
  /// The next event, an object; false after the last.
  bool next(nlohmann::json& event);

 private:
  struct File;

  [[noreturn]] void refuse(const std::string& why) const;
  int get();
  int get_token();
  std::string read_value(int first);
  nlohmann::json parsed(const std::string& text) const;

  const std::string path_;
  std::unique_ptr<File> file_;
  nlohmann::json header_ = nlohmann::json::object();
  bool over_ = false;
};

/// Whose trace it is, as far as the header and the operations after it tell.
struct TraceOrigin {
  int64_t rank = -1;  // -1: not told
  int64_t world_size = -1;
  std::string host;   // for people
  std::string clock;  // equal: on one machine
  int64_t pid = -1;
  int64_t base_ns = 0;  // what times in the file count from, since 1970
};
TraceOrigin origin_of(const TraceReader& reader);
/// Takes the process that an event names, if the header has told none, as Python's do not.
void learn_process(TraceOrigin& origin, const nlohmann::json& event);
/// Takes the rank that an operation of the trace names, if it is one and the header has told none.
void learn_rank(TraceOrigin& origin, int64_t rank);
/// Gives traces without a rank one: that of their process in a trace before, or their place. Returns notes about ranks of
/// which several processes have traces here, which are several runs in one directory.
std::vector<std::string> complete_ranks(const std::vector<TraceOrigin*>& origins);

/// *.json and *.json.gz with ".pt.trace.json" in the name.
bool is_called_like_a_trace(const std::string& path);
/// All such files of a directory, by name. Throws c10::ValueError that
/// names the directory if it can't be read or has none.
std::vector<std::string> trace_files(const std::string& directory);

/// A value of an event that may be of any type, or not there.
double number_of(const nlohmann::json& object, const char* key, double otherwise = 0);
int64_t integer_of(const nlohmann::json& object, const char* key, int64_t otherwise = 0);
std::string text_of(const nlohmann::json& object, const char* key);
/// event["args"], or an empty object.
const nlohmann::json& arguments_of(const nlohmann::json& event);

}  // namespace lockstep::profiler::internal
