#pragma once

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <lockstep/flight/analysis.h>
#include <lockstep/flight/internal/clocks.h>
#include <lockstep/flight/records.h>

/// What the parts of the flight analysis share: the records, indexed, and words for them.
namespace lockstep::flight::internal {

/// A message's place: is it sent, the other's group rank (-1: any), tag.
using Way = std::tuple<bool, int, int>;

/// One rank's operations in one group. "Open" is what has not completed: it waits, or it failed.
struct GroupView {
  const RankRecord* record = nullptr;
  std::map<uint64_t, const Entry*> collectives;  // by sequence
  std::map<Way, const Entry*> open_messages;     // the first of each way
  std::map<Way, const Entry*> last_messages;     // the last that completed

  /// The first collective that is open.
  const Entry* stuck() const;
};

/// A group over all ranks that recorded something of it.
struct GroupPicture {
  GroupRecord group;
  std::map<int, GroupView> views;  // by global rank
};

class Picture {
 public:
  /// Keeps references to the records.
  explicit Picture(const std::vector<RankRecord>& records);

  const RankRecord* record_of(int rank) const;
  const std::vector<GroupPicture>& groups() const { return groups_; }
  const Clocks& clocks() const { return clocks_; }
  /// A time of a rank's clock on a scale that all records share.
  int64_t common(const RankRecord& record, int64_t monotonic_ns) const {
    return clocks_.common(record, monotonic_ns);
  }

  /// The ranks of each host, as far as the records tell, in the order of their first ranks.
  const std::vector<std::pair<std::string, std::vector<int>>>& hosts() const { return hosts_; }
  bool spans_hosts() const { return hosts_.size() > 1; }
  /// "ranks 2 and 3"; in a job over several hosts "ranks 2 and 3 on node-b", or "rank 1 on node-a, rank 2 on node-b".
  std::string who(const std::vector<int>& ranks) const;
  /// The hosts of `group` whose members are all among `ranks`; none in a job on one host.
  std::vector<std::string> whole_hosts(const GroupRecord& group, const std::vector<int>& ranks) const;

  /// Where the rank is: "it waits in recv(…) at x.cc:3 …", or "it is in no operation of Lockstep".
  std::string whereabouts(int rank) const;

 private:
  void add_groups(const RankRecord& record);
  void add_hosts(const std::vector<RankRecord>& records);

  std::map<int, const RankRecord*> records_;
  std::map<int, const Entry*> oldest_pending_;                         // by rank
  std::map<std::pair<std::string, std::vector<int>>, size_t> places_;  // in groups_
  std::vector<GroupPicture> groups_;
  std::vector<std::pair<std::string, std::vector<int>>> hosts_;
  std::map<int, std::string> host_of_;  // by rank
  Clocks clocks_;
};

/// A rank that can't go on before others do something.
struct Wait {
  int rank = 0;
  const Entry* entry = nullptr;
  const GroupPicture* group = nullptr;
  std::vector<int> on;  // global ranks
  bool any = false;     // one of them is enough
};

/// The parts of an operation that must be equal on all ranks: `full` for comparison, `shown` for people.
struct CallSignature {
  std::string shown;
  std::string full;
};
CallSignature signature_of(const Entry& entry, const GroupRecord& group);

/// "all_reduce(SUM, Float [4])"; "recv(Float [4], from rank 3, tag 7)"
std::string call_of(const Entry& entry, const GroupRecord& group);
/// "train.cc:31", or "an unknown place"
std::string site_of(const Entry& entry);
/// "5.0 s"
std::string seconds(int64_t ns);
/// The error's first line.
std::string first_line(const std::string& text);
/// `group "default" (ranks 0-3)`
std::string name_of(const GroupRecord& group);
/// "pending for 5.0 s", "failed after 5.0 s", "completed 5.0 s before its record was written"
std::string state_of(const Entry& entry, const RankRecord& record);
/// The verb that suits the number of ranks: number(ranks, "has", "have")
inline const char* number(const std::vector<int>& ranks, const char* one, const char* many) {
  return ranks.size() == 1 ? one : many;
}

/// The first open place of each group's collectives.
void find_stuck_collectives(const Picture& picture, std::vector<RecordFinding>& findings,
                            std::vector<Wait>& waits);
/// Sends and receives that miss their other side.
void find_unmatched_messages(const Picture& picture, std::vector<RecordFinding>& findings,
                             std::vector<Wait>& waits);
/// A circle among the waits, or else the ranks for which all wait in the end.
void find_circle_or_root(const Picture& picture, const std::vector<Wait>& waits,
                         std::vector<RecordFinding>& findings);

}  // namespace lockstep::flight::internal
