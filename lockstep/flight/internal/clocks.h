#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/flight/clock_bounds.h>
#include <lockstep/flight/records.h>

namespace lockstep::flight::internal {

struct GroupPicture;

/// How the clocks of several machines stand to one another. A rank can't have completed an all_reduce before
/// each other one has begun it; so each operation over two machines bounds the difference of their clocks, from
/// both sides, without a message of its own. Machines that share no such operation are compared by their wall
/// clocks.
class Clocks {
 public:
  Clocks() = default;
  /// `records`: at least one; the first one's machine is the one that the others are compared with.
  Clocks(const std::vector<RankRecord>& records, const std::vector<GroupPicture>& groups);

  /// A time of a record's monotonic clock, on that of the first record's machine.
  int64_t common(const RankRecord& record, int64_t monotonic_ns) const;

  /// How far a machine's wall clock is ahead of the first one's.
  /// Nothing where it is not known, and for the first machine.
  std::optional<ClockOffset> wall_offset(const RankRecord& record) const;

 private:
  /// The offsets of the monotonic clocks, by boot id.
  std::map<std::string, ClockOffset> offsets_;
  std::string reference_;  // a boot id
  int64_t epoch_ns_ = 0;   // its wall clock minus its monotonic one
};

}  // namespace lockstep::flight::internal
