#include <algorithm>
#include <limits>

#include <lockstep/flight/internal/clocks.h>
#include <lockstep/flight/internal/picture.h>

namespace lockstep::flight::internal {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

/// When one machine's ranks were in an operation, by its monotonic clock.
struct Passage {
  int64_t last_begin = 0;      // 0: unknown
  int64_t first_end = kNever;  // of those that completed it
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

ClockBounds bounds_of(const std::vector<GroupPicture>& groups) {
  ClockBounds bounds;
  for (const GroupPicture& group : groups) {
    for (const auto& [sequence, machines] : passages_of(group)) {
      for (const auto& [boot, passage] : machines) {
        if (passage.first_end == kNever) continue;
        for (const auto& [other, begun] : machines) {
          if (begun.last_begin != 0) bounds.add(other, begun.last_begin, boot, passage.first_end);
        }
      }
    }
  }
  return bounds;
}

}  // namespace

Clocks::Clocks(const std::vector<RankRecord>& records, const std::vector<GroupPicture>& groups)
    : reference_(records.front().boot_id),
      epoch_ns_(records.front().realtime_ns - records.front().monotonic_ns) {
  if (std::all_of(records.begin(), records.end(),
                  [&](const RankRecord& record) { return record.boot_id == reference_; })) {
    return;
  }
  offsets_ = bounds_of(groups).offsets(reference_);
}

int64_t Clocks::common(const RankRecord& record, int64_t monotonic_ns) const {
  if (record.boot_id == reference_) return monotonic_ns;
  const auto found = offsets_.find(record.boot_id);
  if (found != offsets_.end()) return monotonic_ns - found->second.ns;
  return monotonic_ns + (record.realtime_ns - record.monotonic_ns) - epoch_ns_;
}

std::optional<ClockOffset> Clocks::wall_offset(const RankRecord& record) const {
  const auto found = offsets_.find(record.boot_id);
  if (found == offsets_.end() || record.boot_id == reference_) return std::nullopt;
  const int64_t epoch = record.realtime_ns - record.monotonic_ns;
  return ClockOffset{found->second.ns + epoch - epoch_ns_, found->second.error_ns};
}

}  // namespace lockstep::flight::internal
