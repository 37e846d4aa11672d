#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/flight/records.h>

/// From the flight records of a job's ranks to words: which rank waits for which in which operation, and
/// where the ranks diverged. Pure functions.
namespace lockstep::flight {

/// One thing that the records show.
struct RecordFinding {
  enum class Kind {
    kMismatch,    // ranks called different operations at one place of a group's order
    kCircular,    // ranks wait for each other in a circle
    kMissing,     // some ranks wait in an operation that others have not called
    kUnmatched,   // a send without its receive, or a receive without its send
    kLate,        // a rank called an operation when others had given it up
    kFailed,      // an operation failed, though all called the same
    kUnknown,     // some ranks wait, and nothing is known of the others
    kRoot,        // for which all ranks wait in the end
    kInProgress,  // all ranks are in it
    kNote,        // about the records themselves
  };
  Kind kind = Kind::kNote;
  std::vector<int> ranks;    // global: those to look at: which differ, are missing, failed
  std::vector<int> waiting;  // global: those that wait, in an operation
  std::string group = {};    // its name, and
  std::string operation = {};
  uint64_t sequence = 0;  // 0: not about one operation
  std::string site = {};  // "train.cc:31": where the waiting ranks called it
  std::string text = {};  // the whole of it, in one or several lines without a newline at the end
};
/// "mismatch", "circular", "missing", …
const char* to_string(RecordFinding::Kind kind);
/// Whether it means that something is wrong.
bool is_problem(RecordFinding::Kind kind);

/// What is known about one rank as a whole.
struct RankSummary {
  int rank = 0;
  int64_t pid = 0;
  std::string host;
  std::string reason;
  uint64_t operations = 0;   // recorded
  uint64_t overwritten = 0;  // older ones
  std::string last = {};     // the last operation and its state, in words
};

/// The ranks of one host, and its clock.
struct HostSummary {
  std::string name;
  std::vector<int> ranks;
  /// How far its wall clock is ahead of the first host's with a record, as the operations of both show, and
  /// within what.
  std::optional<int64_t> clock_ahead_ns;
  int64_t clock_error_ns = 0;
};

struct Analysis {
  int world_size = 0;
  std::vector<HostSummary> hosts;  // in the order of their first ranks; of all ranks that the records name
  /// Where to look first: the ranks for which all wait in the end, or those that the most telling finding blames. None
  /// where nothing is wrong, or all are alike.
  std::vector<int> cause;
  std::string cause_text;          // with their hosts; empty in a job on one
  std::vector<RankSummary> ranks;  // those with a record of this run
  std::vector<int> without_record;
  std::vector<RecordFinding> findings;  // the most telling first

  bool problem() const;
};

/// `records`: at least one, at most one for each rank, as parse() gives them. Records of an earlier run are
/// recognised by the times in them, left out, and noted.
Analysis analyze(std::vector<RankRecord> records);

/// For a terminal; control characters of the records are replaced. Ends with a newline.
std::string describe(const Analysis& analysis);

/// The same as a JSON object: {"status": "problem" | "ok", "world_size", "cause": {"ranks", "hosts"}, "hosts", "ranks",
/// "without_record", "findings": [{"kind", "problem", "ranks", "hosts", "waiting", "group", "operation",
/// "sequence", "site", "text"}]}.
std::string to_json(const Analysis& analysis);

}  // namespace lockstep::flight
