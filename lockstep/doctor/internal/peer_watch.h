#pragma once

#include <vector>

#include <lockstep/base/unique_fd.h>
#include <lockstep/doctor/rank_facts.h>

namespace lockstep::doctor::internal {

/// Knows when the process of a rank has ended, for ranks on this host; of others it knows nothing.
/// Thread-safe.
class PeerWatch {
 public:
  /// `ranks`: all ranks' facts, by rank; a rank without facts has the default ones. `rank`: this one.
  PeerWatch(const std::vector<RankFacts>& ranks, int rank);
  bool has_ended(int rank) const;

 private:
  std::vector<UniqueFd> pidfds_;
};

}  // namespace lockstep::doctor::internal
