#include <algorithm>
#include <iterator>

#include <lockstep/flight/internal/picture.h>

// Sends and receives meet by (sender, receiver, tag), in order; so the first open one of each way is what
// both sides are at. A small send may complete before its receive is called, never the other way round.
namespace lockstep::flight::internal {
namespace {

constexpr size_t kMostFindings = 1000;  // of messages: a user reads no more

/// One open message, seen from the rank that waits in it.
struct Side {
  const Picture* all = nullptr;
  const GroupPicture* group = nullptr;
  int rank = 0;        // global
  int group_rank = 0;  // the same, within the group
  const RankRecord* record = nullptr;
  const Entry* entry = nullptr;
  bool sends = false;
};

enum class Peer { kMeets, kLacks, kUnknown };

int64_t elements(const Tensors& tensors) {
  int64_t sum = 0;
  for (const auto& sizes : tensors.sizes) {
    // Sizes of a hostile file may be anything: wrap around instead of overflowing.
    uint64_t product = 1;
    for (int64_t size : sizes) product *= static_cast<uint64_t>(size);
    sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + product);
  }
  return sum;
}

/// The member's open message on the other side of this one.
const Entry* counterpart(const Side& side, const GroupView& view) {
  const int tag = side.entry->tag;
  const auto own = view.open_messages.find({!side.sends, side.group_rank, tag});
  if (own != view.open_messages.end()) return own->second;
  const auto any = view.open_messages.find({false, -1, tag});
  return side.sends && any != view.open_messages.end() ? any->second : nullptr;
}

Peer look_at(const Side& side, int member) {
  const RankRecord* record = side.all->record_of(member);
  if (record == nullptr) return Peer::kUnknown;
  const auto view = side.group->views.find(member);
  if (view != side.group->views.end()) {
    if (counterpart(side, view->second) != nullptr) return Peer::kMeets;
    // It came after our record was written: we were only early.
    const auto done = view->second.last_messages.find({!side.sends, side.group_rank, side.entry->tag});
    if (done != view->second.last_messages.end() &&
        side.all->common(*record, done->second->ended_ns) >
            side.all->common(*side.record, side.record->monotonic_ns)) {
      return Peer::kMeets;
    }
  }
  const bool outdated = side.all->common(*record, record->monotonic_ns) <
                        side.all->common(*side.record, side.entry->created_ns);
  return outdated ? Peer::kUnknown : Peer::kLacks;
}

std::string other_side(const Side& side) {
  return side.sends ? "receive" : "send";
}

RecordFinding blank(const Side& side) {
  RecordFinding finding;
  finding.waiting = {side.rank};
  finding.group = side.group->group.name;
  finding.operation = side.entry->operation;
  finding.sequence = side.entry->sequence;
  finding.site = site_of(*side.entry);
  finding.text = side.all->who({side.rank}) + " is in " + call_of(*side.entry, side.group->group) + " at " +
                 finding.site + ", message " + std::to_string(side.entry->sequence) + " of " +
                 name_of(side.group->group) + " (" + state_of(*side.entry, *side.record) + ")";
  return finding;
}

std::string error_of(const Side& side) {
  if (side.entry->error.empty()) return "";
  return "\n  error on " + side.all->who({side.rank}) + ": " + first_line(side.entry->error);
}

/// Both sides are there. Told once, by the sender, if what they say differs; otherwise by the side that
/// failed.
void compare(const Side& side, int member, std::vector<RecordFinding>& findings) {
  const GroupView& view = side.group->views.at(member);
  const Entry* other = counterpart(side, view);
  const Tensors& own = side.entry->inputs.sizes.empty() ? side.entry->outputs : side.entry->inputs;
  RecordFinding finding = blank(side);
  if (other != nullptr) {
    const Tensors& theirs = other->outputs.sizes.empty() ? other->inputs : other->outputs;
    if (side.sends && (elements(own) != elements(theirs) || own.dtypes != theirs.dtypes)) {
      finding.kind = RecordFinding::Kind::kMismatch;
      finding.ranks = {side.rank, member};
      finding.text = "MISMATCH: " + finding.text + "\n  " + side.all->who({member}) + " is in " +
                     call_of(*other, side.group->group) + " at " + site_of(*other) + error_of(side);
      findings.push_back(std::move(finding));
      return;
    }
  }
  if (side.entry->state == State::kFailed) {
    finding.kind = RecordFinding::Kind::kFailed;
    finding.ranks = {side.rank, member};
    finding.text = "FAILED: " + finding.text + error_of(side);
  } else {
    finding.kind = RecordFinding::Kind::kInProgress;
    finding.text += "; the other side, " + side.all->who({member}) + ", is there";
  }
  findings.push_back(std::move(finding));
}

/// `members` could be the other side; one of them is enough.
void examine(const Side& side, const std::vector<int>& members, std::vector<RecordFinding>& findings,
             std::vector<Wait>& waits) {
  std::vector<int> lacking;
  std::vector<int> unknown;
  for (int member : members) {
    const Peer peer = look_at(side, member);
    if (peer == Peer::kMeets) return compare(side, member, findings);
    (peer == Peer::kLacks ? lacking : unknown).push_back(member);
  }
  RecordFinding finding = blank(side);
  const std::string title = side.entry->pending() ? "HANG: " : "FAILED: ";
  if (!unknown.empty()) {
    finding.kind = RecordFinding::Kind::kUnknown;
    finding.ranks = unknown;
    finding.text = title + finding.text + "\n  nothing is known of " + side.all->who(unknown) +
                   ": no record, or one written before; write one: kill -USR1 PID";
  } else {
    finding.kind = RecordFinding::Kind::kUnmatched;
    finding.ranks = lacking;
    finding.text = title + finding.text + "\n  " + side.all->who(lacking) + " " +
                   number(lacking, "has", "have") + " called no matching " + other_side(side);
    waits.push_back({side.rank, side.entry, side.group, lacking, members.size() > 1});
  }
  if (lacking.size() == 1) {
    finding.text +=
        "; rank " + std::to_string(lacking.front()) + ": " + side.all->whereabouts(lacking.front());
  }
  finding.text += error_of(side);
  findings.push_back(std::move(finding));
}

}  // namespace

void find_unmatched_messages(const Picture& picture, std::vector<RecordFinding>& findings,
                             std::vector<Wait>& waits) {
  const size_t most = findings.size() + kMostFindings;
  for (const GroupPicture& group : picture.groups()) {
    const std::vector<int>& ranks = group.group.ranks;
    for (const auto& [rank, view] : group.views) {
      const int group_rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
      for (const auto& [way, entry] : view.open_messages) {
        if (findings.size() >= most) return;
        const auto [sends, peer, tag] = way;
        std::vector<int> members;
        if (peer >= 0) {
          members.push_back(ranks[static_cast<size_t>(peer)]);
        } else {
          std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(members),
                       [own = rank](int member) { return member != own; });
        }
        if (members.empty() || (members.size() == 1 && members.front() == rank)) continue;
        examine({&picture, &group, rank, group_rank, view.record, entry, sends}, members, findings, waits);
      }
    }
  }
}

}  // namespace lockstep::flight::internal
