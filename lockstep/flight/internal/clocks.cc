#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

#include <lockstep/flight/internal/clocks.h>
#include <lockstep/flight/internal/picture.h>

namespace lockstep::flight::internal {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
/// Of the records' times, as the reader lets them through: sums and differences of two don't overflow.
constexpr int64_t kMostNs = std::numeric_limits<int64_t>::max() / 4;

/// When one machine's ranks were in an operation, by its monotonic clock.
struct Passage {
  int64_t last_begin = 0;      // 0: unknown
  int64_t first_end = kNever;  // of those that completed it
};

/// How far another machine's clock is ahead, at least and at most.
struct Bounds {
  int64_t least = -kMostNs;
  int64_t most = kMostNs;
  bool known() const { return least > -kMostNs && most < kMostNs; }
};

/// Whether each rank needs what all others bring, so that none completes before all have begun.
bool needs_all(const Entry& entry) {
  for (const char* kind : {"all_reduce", "all_gather", "reduce_scatter", "barrier"}) {
    if (entry.operation.starts_with(kind)) return true;
  }
  return false;
}

/// By sequence, then by boot id.
std::map<uint64_t, std::map<std::string, Passage>> passages_of(const GroupPicture& group) {
  std::map<uint64_t, std::map<std::string, Passage>> passages;
  for (const auto& [rank, view] : group.views) {
    for (const auto& [sequence, entry] : view.collectives) {
      if (!needs_all(*entry)) continue;
      Passage& passage = passages[sequence][view.record->boot_id];
      passage.last_begin = std::max(passage.last_begin, std::max(entry->created_ns, entry->started_ns));
      if (entry->state == State::kCompleted) passage.first_end = std::min(passage.first_end, entry->ended_ns);
    }
  }
  return passages;
}

/// Of each two machines, for both orders.
std::map<std::pair<std::string, std::string>, Bounds> bounds_of(const std::vector<GroupPicture>& groups) {
  std::map<std::pair<std::string, std::string>, Bounds> all;
  for (const GroupPicture& group : groups) {
    for (const auto& [sequence, machines] : passages_of(group)) {
      for (const auto& [boot, passage] : machines) {
        if (passage.first_end == kNever) continue;
        for (const auto& [other, begun] : machines) {
          if (other == boot || begun.last_begin == 0) continue;
          const int64_t ahead = begun.last_begin - passage.first_end;
          Bounds& there = all[{boot, other}];
          there.least = std::max(there.least, ahead);
          Bounds& back = all[{other, boot}];
          back.most = std::min(back.most, -ahead);
        }
      }
    }
  }
  return all;
}

}  // namespace

Clocks::Clocks(const std::vector<RankRecord>& records, const std::vector<GroupPicture>& groups)
    : reference_(records.front().boot_id),
      epoch_ns_(records.front().realtime_ns - records.front().monotonic_ns) {
  if (std::all_of(records.begin(), records.end(),
                  [&](const RankRecord& record) { return record.boot_id == reference_; })) {
    return;
  }
  const auto bounds = bounds_of(groups);
  offsets_[reference_] = {};
  // A machine that shares no operation with the first one may share one with a machine that does.
  for (bool found = true; found;) {
    found = false;
    for (const auto& [pair, bound] : bounds) {
      const auto from = offsets_.find(pair.first);
      if (from == offsets_.end() || offsets_.contains(pair.second) || !bound.known()) continue;
      // Clocks drift, so that over hours the bounds may cross: then the truth changed between them.
      const Offset offset{from->second.ns + (bound.least + bound.most) / 2,
                          std::min(from->second.error_ns + std::abs(bound.most - bound.least) / 2, kMostNs)};
      if (std::abs(offset.ns) > kMostNs) continue;
      offsets_.emplace(pair.second, offset);
      found = true;
      break;
    }
  }
}

int64_t Clocks::common(const RankRecord& record, int64_t monotonic_ns) const {
  if (record.boot_id == reference_) return monotonic_ns;
  const auto found = offsets_.find(record.boot_id);
  if (found != offsets_.end()) return monotonic_ns - found->second.ns;
  return monotonic_ns + (record.realtime_ns - record.monotonic_ns) - epoch_ns_;
}

std::optional<Clocks::Offset> Clocks::wall_offset(const RankRecord& record) const {
  const auto found = offsets_.find(record.boot_id);
  if (found == offsets_.end() || record.boot_id == reference_) return std::nullopt;
  const int64_t epoch = record.realtime_ns - record.monotonic_ns;
  return Offset{found->second.ns + epoch - epoch_ns_, found->second.error_ns};
}

}  // namespace lockstep::flight::internal
