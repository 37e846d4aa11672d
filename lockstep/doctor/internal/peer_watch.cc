#include <lockstep/base/process/pidfd.h>
#include <lockstep/doctor/internal/peer_watch.h>

namespace lockstep::doctor::internal {

PeerWatch::PeerWatch(const std::vector<RankFacts>& ranks, int rank) : pidfds_(ranks.size()) {
  const RankFacts& own = ranks.at(static_cast<size_t>(rank));
  for (size_t peer = 0; peer < ranks.size(); ++peer) {
    const RankFacts& facts = ranks[peer];
    if (facts.pid <= 0 || facts.pid == own.pid || facts.host != own.host) continue;
    // One that ended meanwhile has no pidfd, and is then found out by the timeout.
    pidfds_[peer] = open_pidfd(static_cast<pid_t>(facts.pid));
  }
}

bool PeerWatch::has_ended(int rank) const {
  return process_has_ended(pidfds_.at(static_cast<size_t>(rank)));
}

}  // namespace lockstep::doctor::internal
