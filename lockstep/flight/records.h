#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

/// The files of the flight recorder: what they hold, and how they are written and read.
///
/// One JSON file for each rank, rank_<n>.json. Fields have the names that PyTorch's recorder gives them
/// (c10d/FlightRecorder.hpp) where it has them. Files come from elsewhere and may be anything: the reader
/// checks every value it uses. All functions are thread-safe.
namespace lockstep::flight {

/// The largest LOCKSTEP_FLIGHT_RECORDS, and the most entries of a file.
inline constexpr int64_t kMaxEntries = 50'000;

enum class State { kScheduled, kStarted, kCompleted, kFailed };
/// "scheduled", "started", "completed", "failed"
const char* to_string(State state);

/// The tensors of one side of an operation; sizes and dtypes are of equal length.
struct Tensors {
  std::vector<std::vector<int64_t>> sizes;
  std::vector<std::string> dtypes;  // "Float"
  bool operator==(const Tensors&) const = default;
};

/// One operation of one rank.
struct Entry {
  uint64_t record_id = 0;  // counts the process's operations, from 1
  int group = 0;           // index in RankRecord::groups
  std::string operation;   // "all_reduce"
  std::string detail;      // "SUM"
  bool point_to_point = false;
  uint64_t sequence = 0;
  int peer = -1;  // group rank
  int tag = 0;
  bool asynchronous = false;
  Tensors inputs;
  Tensors outputs;
  State state = State::kScheduled;
  // Nanoseconds of the host's monotonic clock; 0: not yet.
  int64_t created_ns = 0;
  int64_t started_ns = 0;
  int64_t ended_ns = 0;  // completed or failed
  int64_t timeout_ms = 0;
  std::string error;
  std::string file;  // of the call
  int64_t line = 0;
  std::string function;
  std::string purpose = {};  // "DDP bucket 3 of 5"; empty: the caller's own

  bool pending() const { return state == State::kScheduled || state == State::kStarted; }
};

/// A group of which the rank recorded an operation.
struct GroupRecord {
  std::string key;   // the same on all members
  std::string name;  // for people
  std::vector<int> ranks;
  std::vector<std::string> hosts = {};  // by group rank; empty: all on one, or not known
  bool operator==(const GroupRecord&) const = default;
};

/// What one rank wrote.
struct RankRecord {
  int rank = 0;
  int world_size = 1;
  int64_t pid = 0;
  std::string host;
  std::string boot_id;  // equal: the monotonic clocks may be compared
  std::string program;
  std::string reason;        // why it was written: "timeout", "abort", "SIGUSR1"; several in order of time
  int64_t monotonic_ns = 0;  // when it was written
  int64_t realtime_ns = 0;   // the same moment, since 1970
  int64_t loaded_ns = 0;     // when the program loaded the library, since 1970
  uint64_t overwritten = 0;  // older operations that the ring no longer held
  std::vector<GroupRecord> groups;
  std::vector<Entry> entries;  // by record_id
};

/// The text of a rank's file; one line for each entry. Invalid UTF-8 is replaced.
std::string to_json(const RankRecord& record);

/// The reverse, for text from an untrusted source. Throws c10::ValueError that begins with `name` and says
/// which value is wrong. What it returns is consistent: groups contain the rank, entries name existing groups
/// and peers, record ids rise.
RankRecord parse(std::string_view text, const std::string& name);

/// parse() of a file of at most 64 MiB that must be a regular one. Throws c10::ValueError that names it.
RankRecord read_file(const std::string& path);

/// All rank_<n>.json of these directories, by rank, for each host may have written into one of its own; other files are
/// left alone. Throws c10::ValueError that names the directory or the file when it can't be read, none holds a record,
/// two hold one of the same rank, or a file's rank is not the one of its name.
std::vector<RankRecord> read_directories(const std::vector<std::string>& paths);

/// "rank_3.json"
std::string file_name(int rank);

}  // namespace lockstep::flight
