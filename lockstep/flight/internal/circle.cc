#include <algorithm>
#include <cstddef>
#include <set>

#include <lockstep/flight/internal/picture.h>

namespace lockstep::flight::internal {
namespace {

using WaitsByRank = std::map<int, std::vector<const Wait*>>;

/// Whether the wait can end when the ranks outside of `held` go on.
bool can_end(const Wait& wait, const std::set<int>& held) {
  const auto free = [&](int rank) { return !held.contains(rank); };
  return wait.any ? std::any_of(wait.on.begin(), wait.on.end(), free)
                  : std::all_of(wait.on.begin(), wait.on.end(), free);
}

/// Ranks that no progress of the others can free: the greatest set that holds itself.
std::set<int> held_forever(const WaitsByRank& waits) {
  std::set<int> held;
  for (const auto& [rank, own] : waits) held.insert(rank);
  for (bool changed = true; changed;) {
    changed =
        std::erase_if(held, [&](int rank) {
          const auto& own = waits.at(rank);
          return std::all_of(own.begin(), own.end(), [&](const Wait* wait) { return can_end(*wait, held); });
        }) > 0;
  }
  return held;
}

/// Follows the waits within `held` until a rank comes again.
std::vector<std::pair<const Wait*, int>> circle_in(const WaitsByRank& waits, const std::set<int>& held) {
  std::vector<std::pair<const Wait*, int>> path;  // the wait, and the rank waited for
  std::map<int, size_t> visited;
  int rank = *held.begin();
  while (!visited.contains(rank)) {
    visited[rank] = path.size();
    for (const Wait* wait : waits.at(rank)) {
      if (can_end(*wait, held)) continue;
      const auto next =
          std::find_if(wait->on.begin(), wait->on.end(), [&](int other) { return held.contains(other); });
      path.emplace_back(wait, *next);
      rank = *next;
      break;
    }
  }
  path.erase(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(visited[rank]));
  return path;
}

RecordFinding describe_circle(const Picture& picture,
                              const std::vector<std::pair<const Wait*, int>>& circle) {
  RecordFinding finding;
  finding.kind = RecordFinding::Kind::kCircular;
  bool certain = true;
  std::string lines;
  for (const auto& [wait, next] : circle) {
    const Entry& entry = *wait->entry;
    certain = certain && !entry.asynchronous;
    finding.ranks.push_back(wait->rank);
    lines += "\n  " + picture.who({wait->rank}) + " in " + call_of(entry, wait->group->group) + " at " +
             site_of(entry) + " (" + name_of(wait->group->group) + ") waits for " + picture.who({next});
  }
  std::sort(finding.ranks.begin(), finding.ranks.end());
  finding.waiting = finding.ranks;
  finding.site = site_of(*circle.front().first->entry);
  finding.text = "CIRCULAR WAIT: " + picture.who(finding.ranks) + " wait for each other" + lines;
  if (!certain) {
    finding.text += "\n  (asynchronous operations are among them: only if the ranks wait for those now)";
  }
  return finding;
}

}  // namespace

void find_circle_or_root(const Picture& picture, const std::vector<Wait>& waits,
                         std::vector<RecordFinding>& findings) {
  WaitsByRank by_rank;
  for (const Wait& wait : waits) by_rank[wait.rank].push_back(&wait);
  const std::set<int> held = held_forever(by_rank);
  if (!held.empty()) {
    findings.push_back(describe_circle(picture, circle_in(by_rank, held)));
    return;
  }
  std::set<int> roots;
  for (const Wait& wait : waits) {
    for (int rank : wait.on) {
      if (!by_rank.contains(rank)) roots.insert(rank);
    }
  }
  const bool chain = std::any_of(waits.begin(), waits.end(), [&](const Wait& wait) {
    return std::any_of(wait.on.begin(), wait.on.end(), [&](int rank) { return by_rank.contains(rank); });
  });
  if (!chain || roots.empty()) return;  // with a single hang, that says it all
  RecordFinding finding;
  finding.kind = RecordFinding::Kind::kRoot;
  finding.ranks.assign(roots.begin(), roots.end());
  finding.text = "In the end all wait for " + picture.who(finding.ranks) + ", which " +
                 number(finding.ranks, "waits", "wait") + " for no other rank: begin there";
  findings.push_back(std::move(finding));
}

}  // namespace lockstep::flight::internal
