#include <algorithm>
#include <limits>
#include <utility>

#include <lockstep/flight/internal/picture.h>

// Collectives of a group complete in the order of their sequence numbers, on all members or on none. So the
// lowest sequence that is open anywhere is where the group stands, and what each member did at that sequence
// says why.
namespace lockstep::flight::internal {
namespace {

/// The members of a group at one sequence number.
struct Scene {
  const Picture* all = nullptr;
  const GroupPicture* picture = nullptr;
  uint64_t sequence = 0;
  std::vector<std::pair<int, const Entry*>> present;  // they called something
  std::vector<int> absent;                            // they have a record, and called nothing yet
  std::vector<int> outdated;  // their record is older than the first call, so it can't tell
  std::vector<int> unknown;   // no record
  int64_t first_call = std::numeric_limits<int64_t>::max();  // on the common clock
  int64_t last_call = std::numeric_limits<int64_t>::min();
  int64_t first_end = std::numeric_limits<int64_t>::max();  // when the first gave it up

  const GroupRecord& group() const { return picture->group; }
  std::string place() const { return "sequence " + std::to_string(sequence) + " of " + name_of(group()); }
};

/// The lowest sequence that is open on some member; 0 if there is none.
uint64_t open_sequence(const GroupPicture& picture) {
  uint64_t lowest = 0;
  for (const auto& [rank, view] : picture.views) {
    const Entry* stuck = view.stuck();
    if (stuck != nullptr && (lowest == 0 || stuck->sequence < lowest)) lowest = stuck->sequence;
  }
  return lowest;
}

Scene scene_of(const Picture& all, const GroupPicture& picture, uint64_t sequence) {
  Scene scene;
  scene.all = &all;
  scene.picture = &picture;
  scene.sequence = sequence;
  for (const auto& [rank, view] : picture.views) {
    const auto found = view.collectives.find(sequence);
    if (found == view.collectives.end()) continue;
    scene.present.emplace_back(rank, found->second);
    const int64_t called = all.common(*view.record, found->second->created_ns);
    scene.first_call = std::min(scene.first_call, called);
    scene.last_call = std::max(scene.last_call, called);
    if (found->second->state == State::kFailed) {
      scene.first_end = std::min(scene.first_end, all.common(*view.record, found->second->ended_ns));
    }
  }
  for (int rank : picture.group.ranks) {
    const RankRecord* record = all.record_of(rank);
    const auto view = picture.views.find(rank);
    const bool recorded = view != picture.views.end();
    if (recorded && view->second.collectives.contains(sequence)) continue;
    if (record == nullptr) {
      scene.unknown.push_back(rank);
    } else if (recorded && !view->second.collectives.empty() &&
               view->second.collectives.rbegin()->first > sequence) {
      continue;  // done long ago, and overwritten
    } else if (all.common(*record, record->monotonic_ns) < scene.first_call) {
      scene.outdated.push_back(rank);
    } else {
      scene.absent.push_back(rank);
    }
  }
  return scene;
}

/// Ranks that called the same, from the same place, are told of together.
struct Party {
  CallSignature signature;
  std::string site;
  std::vector<int> ranks;
  const Entry* entry = nullptr;  // the first rank's
};

/// The largest camp of ranks that called the same comes first, the smallest last.
std::vector<Party> parties_of(const Scene& scene) {
  std::map<std::pair<std::string, std::string>, Party> parties;
  std::map<std::string, size_t> camps;
  for (const auto& [rank, entry] : scene.present) {
    CallSignature signature = signature_of(*entry, scene.group());
    ++camps[signature.full];
    Party& party = parties[{signature.full, site_of(*entry)}];
    if (party.ranks.empty()) party = {std::move(signature), site_of(*entry), {}, entry};
    party.ranks.push_back(rank);
  }
  std::vector<Party> result;
  for (auto& [key, party] : parties) result.push_back(std::move(party));
  const auto weight = [&](const Party& party) {
    return std::pair(camps[party.signature.full], party.ranks.size());
  };
  std::stable_sort(result.begin(), result.end(),
                   [&](const Party& a, const Party& b) { return weight(a) > weight(b); });
  return result;
}

bool agree(const std::vector<Party>& parties) {
  return std::all_of(parties.begin(), parties.end(), [&](const Party& party) {
    return party.signature.full == parties.front().signature.full;
  });
}

/// "rank 0 called it at train.cc:31 (pending for 5.0 s)"
std::string callers(const Scene& scene, const std::vector<Party>& parties, bool same) {
  std::string text;
  for (const Party& party : parties) {
    const RankRecord& record = *scene.picture->views.at(party.ranks.front()).record;
    text += "\n  " + scene.all->who(party.ranks) + " called " + (same ? "it" : party.signature.shown) +
            " at " + party.site + " (" + state_of(*party.entry, record) + ")";
  }
  return text;
}

std::string errors(const Scene& scene) {
  constexpr int kMost = 3;
  std::string text;
  int shown = 0;
  for (const auto& [rank, entry] : scene.present) {
    if (entry->error.empty() || ++shown > kMost) continue;
    text += "\n  error on " + scene.all->who({rank}) + ": " + first_line(entry->error);
  }
  return text;
}

/// Of `ranks`, which `did` not: the hosts of which no member did.
std::string hosts_without(const Scene& scene, const std::vector<int>& ranks, const char* did) {
  std::string text;
  for (const std::string& host : scene.all->whole_hosts(scene.group(), ranks)) {
    text += "\n  no rank of host " + host + " " + did;
  }
  return text;
}

/// What a member did last in the group, and where it is now.
std::string absentee(const Picture& all, const Scene& scene, int rank) {
  std::string text = "\n  " + all.who({rank});
  const auto view = scene.picture->views.find(rank);
  const Entry* last = nullptr;
  if (view != scene.picture->views.end() && !view->second.collectives.empty()) {
    last = view->second.collectives.rbegin()->second;
  }
  if (last == nullptr) {
    text += " has no collective of this group in its record";
  } else {
    text += " was last in sequence " + std::to_string(last->sequence) + ", " + call_of(*last, scene.group()) +
            " at " + site_of(*last) + " (" + state_of(*last, *view->second.record) + ")";
  }
  return text + "; now " + all.whereabouts(rank);
}

std::string strangers(const Scene& scene) {
  std::string text;
  if (!scene.outdated.empty()) {
    text += "\n  nothing is known of " + scene.all->who(scene.outdated) + ": the " +
            number(scene.outdated, "record was", "records were") +
            " written before the others called it; write a new one: kill -USR1 PID";
  }
  if (!scene.unknown.empty()) {
    text += "\n  nothing is known of " + scene.all->who(scene.unknown) +
            ", which wrote no record: ended, killed, "
            "or not asked (kill -USR1 PID)" +
            hosts_without(
                scene, scene.unknown,
                "wrote one: bring its records here too, and see whether it is up and the wire to it whole");
  }
  return text;
}

/// Whether `rank` called from `sequence` on what `other` called from `sequence` + 1 on.
bool shifted(const GroupPicture& picture, int rank, int other, uint64_t sequence) {
  const auto& own = picture.views.at(rank).collectives;
  const auto& theirs = picture.views.at(other).collectives;
  bool compared = false;
  for (auto each = own.find(sequence); each != own.end(); ++each) {
    const auto counterpart = theirs.find(each->first + 1);
    if (counterpart == theirs.end()) break;
    compared = true;
    if (signature_of(*each->second, picture.group).full !=
        signature_of(*counterpart->second, picture.group).full) {
      return false;
    }
  }
  return compared;
}

/// Several operations ahead show whether one was left out or added.
std::string shift_hint(const Scene& scene, const std::vector<Party>& parties) {
  const int many = parties.front().ranks.front();
  const int few = parties.back().ranks.front();
  if (shifted(*scene.picture, few, many, scene.sequence)) {
    return "\n  " + scene.all->who({few}) + " seems to have left out " + parties.front().signature.shown +
           ": what it calls is what rank " + std::to_string(many) + " calls next";
  }
  if (shifted(*scene.picture, many, few, scene.sequence)) {
    return "\n  " + scene.all->who({few}) + " seems to have called " + parties.back().signature.shown +
           " in addition: what it calls next is what rank " + std::to_string(many) + " calls";
  }
  return "";
}

/// The ranks that called something else than most did; if no call has most ranks, all of them.
std::vector<int> dissenters(const std::vector<Party>& parties) {
  std::map<std::string, std::vector<int>> camps;
  for (const Party& party : parties) {
    auto& camp = camps[party.signature.full];
    camp.insert(camp.end(), party.ranks.begin(), party.ranks.end());
  }
  size_t most = 0;
  for (const auto& [signature, ranks] : camps) most = std::max(most, ranks.size());
  const auto largest =
      std::count_if(camps.begin(), camps.end(), [&](const auto& camp) { return camp.second.size() == most; });
  std::vector<int> result;
  for (const auto& [signature, ranks] : camps) {
    if (ranks.size() < most || largest > 1) result.insert(result.end(), ranks.begin(), ranks.end());
  }
  std::sort(result.begin(), result.end());
  return result;
}

RecordFinding blank(const Scene& scene, const std::vector<Party>& parties) {
  RecordFinding finding;
  finding.group = scene.group().name;
  finding.operation = parties.front().entry->operation;
  finding.sequence = scene.sequence;
  finding.site = parties.front().site;
  for (const auto& [rank, entry] : scene.present) {
    if (entry->state != State::kCompleted) finding.waiting.push_back(rank);
  }
  return finding;
}

void describe_mismatch(const Scene& scene, const std::vector<Party>& parties, RecordFinding& finding) {
  finding.kind = RecordFinding::Kind::kMismatch;
  finding.ranks = dissenters(parties);
  const bool same_name = std::all_of(parties.begin(), parties.end(), [&](const Party& party) {
    return party.entry->operation == finding.operation;
  });
  finding.text = "MISMATCH at " + scene.place() + ": " +
                 (same_name ? finding.operation + " was called with different arguments"
                            : "different operations were called") +
                 callers(scene, parties, false) + shift_hint(scene, parties);
}

void describe_missing(const Picture& all, const Scene& scene, const std::vector<Party>& parties,
                      RecordFinding& finding) {
  constexpr size_t kMost = 8;
  finding.kind = RecordFinding::Kind::kMissing;
  finding.ranks = scene.absent;
  finding.text = "HANG: " + all.who(scene.absent) + " " + number(scene.absent, "has", "have") +
                 " not called " + parties.front().signature.shown + ", " + scene.place() +
                 callers(scene, parties, true) + hosts_without(scene, scene.absent, "has called it");
  for (size_t i = 0; i < std::min(scene.absent.size(), kMost); ++i) {
    finding.text += absentee(all, scene, scene.absent[i]);
  }
}

/// All that are known called the same.
void describe_agreement(const Scene& scene, const std::vector<Party>& parties, RecordFinding& finding) {
  const bool failed = scene.first_end != std::numeric_limits<int64_t>::max();
  const std::string what = parties.front().signature.shown + ", " + scene.place();
  if (failed && scene.last_call > scene.first_end) {
    finding.kind = RecordFinding::Kind::kLate;
    finding.text = ": called by some when others had given it up, " +
                   seconds(scene.last_call - scene.first_call) + " after the first call";
  } else if (!scene.unknown.empty() || !scene.outdated.empty()) {
    finding.kind = RecordFinding::Kind::kUnknown;
    finding.ranks = scene.unknown;
    finding.ranks.insert(finding.ranks.end(), scene.outdated.begin(), scene.outdated.end());
    std::sort(finding.ranks.begin(), finding.ranks.end());
    finding.text = failed ? " failed" : " waits for ranks of which nothing is known";
  } else if (failed) {
    finding.kind = RecordFinding::Kind::kFailed;
    finding.ranks = finding.waiting;
    finding.text = " failed, though all members called it alike";
  } else {
    finding.kind = RecordFinding::Kind::kInProgress;
    finding.text = " is in progress: all members are in it, or through it";
  }
  const std::string title = is_problem(finding.kind) ? (failed ? "FAILED: " : "HANG: ") : "";
  finding.text = title + what + finding.text + callers(scene, parties, true);
}

}  // namespace

void find_stuck_collectives(const Picture& picture, std::vector<RecordFinding>& findings,
                            std::vector<Wait>& waits) {
  for (const GroupPicture& group : picture.groups()) {
    const uint64_t sequence = open_sequence(group);
    if (sequence == 0) continue;
    const Scene scene = scene_of(picture, group, sequence);
    const std::vector<Party> parties = parties_of(scene);
    RecordFinding finding = blank(scene, parties);
    if (!agree(parties)) {
      describe_mismatch(scene, parties, finding);
    } else if (!scene.absent.empty()) {
      describe_missing(picture, scene, parties, finding);
      for (const auto& [rank, entry] : scene.present) {
        if (entry->state == State::kCompleted) continue;
        waits.push_back({.rank = rank, .entry = entry, .group = &group, .on = scene.absent, .any = false});
      }
    } else {
      describe_agreement(scene, parties, finding);
      if (finding.kind == RecordFinding::Kind::kLate) {
        for (const auto& [rank, entry] : scene.present) {
          const int64_t called = picture.common(*group.views.at(rank).record, entry->created_ns);
          if (called > scene.first_end) finding.ranks.push_back(rank);
        }
        finding.text += "\n  " + picture.who(finding.ranks) + " came too late";
      }
    }
    finding.text += strangers(scene) + errors(scene);
    findings.push_back(std::move(finding));
  }
}

}  // namespace lockstep::flight::internal
