#include <algorithm>
#include <iterator>

#include <c10/util/StringUtil.h>

#include <lockstep/base/ranks.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/flight/internal/picture.h>

namespace lockstep::flight::internal {
namespace {

constexpr size_t kShownTensors = 3;

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

std::string shape_text(const std::string& dtype, const std::vector<int64_t>& sizes) {
  return dtype + " [" + c10::Join(", ", sizes) + "]";
}

/// The tensors that all ranks must agree on: a scatter's inputs exist on its source only.
const Tensors& common_tensors(const Entry& entry) {
  const bool by_outputs = contains(entry.operation, "scatter") || entry.inputs.sizes.empty();
  return by_outputs ? entry.outputs : entry.inputs;
}

std::vector<std::string> shape_texts(const Entry& entry) {
  const Tensors& tensors = common_tensors(entry);
  std::vector<std::string> texts;
  for (size_t i = 0; i < tensors.sizes.size(); ++i) {
    texts.push_back(shape_text(tensors.dtypes[i], tensors.sizes[i]));
  }
  if (contains(entry.operation, "all_to_all")) {  // sizes may differ by rank
    texts.clear();
    if (!tensors.dtypes.empty()) texts.push_back(tensors.dtypes.front());
  }
  return texts;
}

/// "src rank 0" where an operation has a root; a message's other side.
std::string peer_text(const Entry& entry, const GroupRecord& group) {
  if (entry.peer < 0) return entry.point_to_point ? "from any rank" : "";
  const std::string name = "rank " + std::to_string(group.ranks[static_cast<size_t>(entry.peer)]);
  if (entry.point_to_point) return (contains(entry.operation, "send") ? "to " : "from ") + name;
  const bool source = contains(entry.operation, "broadcast") || contains(entry.operation, "scatter");
  return (source ? "src " : "dst ") + name;
}

}  // namespace

const Entry* GroupView::stuck() const {
  const auto open = std::find_if(collectives.begin(), collectives.end(),
                                 [](const auto& each) { return each.second->state != State::kCompleted; });
  return open == collectives.end() ? nullptr : open->second;
}

Picture::Picture(const std::vector<RankRecord>& records) {
  for (const RankRecord& record : records) {
    records_[record.rank] = &record;
    add_groups(record);
    // Failed operations hold no rank, so where a rank is shows in what still waits.
    const auto pending = std::find_if(record.entries.begin(), record.entries.end(),
                                      [](const Entry& entry) { return entry.pending(); });
    if (pending != record.entries.end()) oldest_pending_[record.rank] = &*pending;
  }
  add_hosts(records);
  clocks_ = Clocks(records, groups_);
}

/// Also of ranks that wrote no record: those of the others say where the members of their groups are.
void Picture::add_hosts(const std::vector<RankRecord>& records) {
  for (const RankRecord& record : records) {
    host_of_[record.rank] = record.host;
    for (const GroupRecord& group : record.groups) {
      for (size_t i = 0; i < group.hosts.size(); ++i) host_of_.emplace(group.ranks[i], group.hosts[i]);
    }
  }
  for (const auto& [rank, host] : host_of_) {
    auto found =
        std::find_if(hosts_.begin(), hosts_.end(), [&](const auto& each) { return each.first == host; });
    if (found == hosts_.end()) found = hosts_.insert(hosts_.end(), {host, {}});
    found->second.push_back(rank);
  }
}

std::string Picture::who(const std::vector<int>& ranks) const {
  constexpr size_t kMostHosts = 4;
  if (!spans_hosts()) return name_ranks(ranks);
  std::string text;
  size_t named = 0;
  size_t placed = 0;
  for (const auto& [host, there] : hosts_) {
    std::vector<int> part;
    std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(part),
                 [&](int rank) { return std::find(there.begin(), there.end(), rank) != there.end(); });
    if (part.empty()) continue;
    placed += part.size();
    ++named;
    text += (text.empty() ? "" : ", ") + name_ranks(part) + " on " + host;
  }
  if (named > kMostHosts) return name_ranks(ranks) + " on " + std::to_string(named) + " hosts";
  return placed == ranks.size() ? text : name_ranks(ranks);
}

std::vector<std::string> Picture::whole_hosts(const GroupRecord& group, const std::vector<int>& ranks) const {
  std::vector<std::string> result;
  if (!spans_hosts()) return result;
  for (const auto& [host, there] : hosts_) {
    size_t members = 0;
    size_t among = 0;
    for (const int rank : there) {
      if (std::find(group.ranks.begin(), group.ranks.end(), rank) == group.ranks.end()) continue;
      ++members;
      if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) ++among;
    }
    if (members > 0 && members == among) result.push_back(host);
  }
  return result;
}

void Picture::add_groups(const RankRecord& record) {
  std::vector<size_t> place_of;
  std::map<size_t, size_t> latest;  // a key that comes again is a group made anew; the earlier one is over
  for (const GroupRecord& group : record.groups) {
    const auto [place, fresh] = places_.emplace(std::pair(group.key, group.ranks), groups_.size());
    if (fresh) groups_.push_back({group, {}});
    groups_[place->second].views[record.rank].record = &record;
    latest[place->second] = place_of.size();
    place_of.push_back(place->second);
  }
  for (const Entry& entry : record.entries) {
    const auto index = static_cast<size_t>(entry.group);
    if (latest.at(place_of[index]) != index) continue;
    GroupView& view = groups_[place_of[index]].views[record.rank];
    if (!entry.point_to_point) {
      view.collectives[entry.sequence] = &entry;
      continue;
    }
    const Way way{contains(entry.operation, "send"), entry.peer, entry.tag};
    if (entry.state == State::kCompleted) {
      view.last_messages[way] = &entry;
    } else {
      view.open_messages.emplace(way, &entry);
    }
  }
}

const RankRecord* Picture::record_of(int rank) const {
  const auto found = records_.find(rank);
  return found == records_.end() ? nullptr : found->second;
}

std::string Picture::whereabouts(int rank) const {
  const RankRecord* record = record_of(rank);
  if (record == nullptr) return "nothing is known of it";
  const auto found = oldest_pending_.find(rank);
  if (found == oldest_pending_.end()) return "it is in no operation of Lockstep";
  const Entry& entry = *found->second;
  const GroupRecord& group = record->groups[static_cast<size_t>(entry.group)];
  return std::string(entry.asynchronous ? "it has started " : "it waits in ") + call_of(entry, group) +
         " at " + site_of(entry) + " (" + (entry.point_to_point ? "message " : "sequence ") +
         std::to_string(entry.sequence) + " of " + name_of(group) + ")";
}

CallSignature signature_of(const Entry& entry, const GroupRecord& group) {
  std::vector<std::string> parts;
  if (contains(entry.operation, "reduce") && !entry.detail.empty()) parts.push_back(entry.detail);
  const std::vector<std::string> shapes = shape_texts(entry);
  std::vector<std::string> shown = parts;
  for (size_t i = 0; i < shapes.size(); ++i) {
    parts.push_back(shapes[i]);
    if (i < kShownTensors) shown.push_back(shapes[i]);
  }
  if (shapes.size() > kShownTensors) {
    shown.push_back("… " + std::to_string(shapes.size() - kShownTensors) + " more");
  }
  if (const std::string peer = peer_text(entry, group); !peer.empty()) {
    parts.push_back(peer);
    shown.push_back(peer);
  }
  if (entry.point_to_point && entry.tag != 0) shown.push_back("tag " + std::to_string(entry.tag));
  return {entry.operation + "(" + c10::Join(", ", shown) + ")",
          entry.operation + "(" + c10::Join(", ", parts) + ")"};
}

std::string call_of(const Entry& entry, const GroupRecord& group) {
  return signature_of(entry, group).shown;
}

std::string site_of(const Entry& entry) {
  if (entry.file.empty()) return "an unknown place";
  return entry.file + ":" + std::to_string(entry.line) +
         (entry.purpose.empty() ? "" : " for " + entry.purpose);
}

std::string seconds(int64_t ns) {
  return formatted("%.1f s", static_cast<double>(ns) / 1e9);
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

std::string name_of(const GroupRecord& group) {
  return "group \"" + group.name + "\" (" + name_ranks(group.ranks) + ")";
}

std::string state_of(const Entry& entry, const RankRecord& record) {
  if (entry.pending()) return "pending for " + seconds(record.monotonic_ns - entry.created_ns);
  if (entry.state == State::kFailed) return "failed after " + seconds(entry.ended_ns - entry.created_ns);
  return "completed " + seconds(record.monotonic_ns - entry.ended_ns) + " before its record was written";
}

}  // namespace lockstep::flight::internal
