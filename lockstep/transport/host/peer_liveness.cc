#include <algorithm>

#include <lockstep/transport/host/peer_liveness.h>

namespace lockstep::transport {
namespace {

bool is_final(PeerState state) {
  return state != PeerState::kAlive && state != PeerState::kSuspected;
}

}  // namespace

void PeerLiveness::hear() {
  silent_ = Duration(0);
  looked_.reset();  // silence counts from the next look
  stopped_ = false;
  if (!is_final(state_)) state_ = PeerState::kAlive;
}

void PeerLiveness::hear_of(bool stopped) {
  stopped_ = stopped;
  // A rank that keeps another one waiting is asked for when that one's time is up, and named some time later.
  stopped_holds_ = kLooks;
  unspoken_ = Duration(0);
}

void PeerLiveness::end(PeerState state) {
  if (!is_final(state_)) state_ = state;
}

PeerLiveness::Action PeerLiveness::look(Time now, bool awaited) {
  if (is_final(state_)) return Action::kNone;
  if (!awaited) {
    const bool stopped = stopped_ && stopped_holds_-- > 0;
    hear();
    stopped_ = stopped;
    return Action::kNone;
  }
  const Duration passed = looked_ ? std::min<Duration>(now - *looked_, 2 * interval(limit_)) : Duration(0);
  looked_ = now;
  silent_ += passed;
  unspoken_ += passed;
  if (silent_ < interval(limit_)) return Action::kNone;
  if (silent_ < limit_ / 2) return Action::kHeartbeat;
  state_ = PeerState::kSuspected;
  if (silent_ < limit_ || (stopped_ && unspoken_ < limit_)) return Action::kAskHost;
  state_ = PeerState::kUnreachable;
  return Action::kGiveUp;
}

}  // namespace lockstep::transport
