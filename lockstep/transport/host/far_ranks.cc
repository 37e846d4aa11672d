#include <algorithm>
#include <cerrno>
#include <chrono>
#include <sys/eventfd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/log.h>
#include <lockstep/base/ranks.h>
#include <lockstep/base/text/format_duration.h>
#include <lockstep/transport/host/host_transport.h>

// Of HostTransport: whether the ranks of other hosts live.
namespace lockstep::transport {
namespace {

/// Others of a host that are asked how a rank of it is.
constexpr size_t kMostWitnesses = 8;

/// By which an engine loses connections.
bool has_no_descriptor_left() {
  const UniqueFd any(::eventfd(0, EFD_CLOEXEC));
  return !any && (errno == EMFILE || errno == ENFILE);
}

/// In tenths of a second: how often this rank looks says no more.
std::string format_silence(const PeerLiveness& life) {
  return format_duration(std::chrono::round<std::chrono::duration<int64_t, std::deci>>(life.silence()));
}

}  // namespace

PeerState HostTransport::state_of(int rank) const {
  TORCH_INTERNAL_ASSERT(!is_here(rank));
  std::lock_guard lock(segments_mutex_);
  return peers_[rank]->life->state();
}

std::string HostTransport::describe_silence(int rank) const {
  if (is_here(rank)) return "";
  std::lock_guard lock(segments_mutex_);
  const PeerLiveness& life = *peers_[rank]->life;
  if (life.state() != PeerState::kSuspected) return "";
  return "has been silent for " + format_silence(life);
}

Deadline HostTransport::expect(const std::vector<int>& ranks) {
  const auto interval = PeerLiveness::interval(heartbeat_timeout_);
  const auto expected = Deadline::after(2 * interval);
  std::lock_guard lock(segments_mutex_);
  for (const int rank : ranks) {
    if (is_here(rank)) continue;
    meet(rank);
    peers_[rank]->expected = expected;
  }
  return Deadline::after(interval);
}

/// By the monitor thread, each PeerLiveness::interval(). Of ranks with which this one has no messages nothing is expected.
void HostTransport::look_at_far_ranks() {
  // Where the wire's thread did not run, either, what the others have said has come all the same.
  wire_->before_sleep();
  const auto now = std::chrono::steady_clock::now();
  std::vector<int> given_up;
  std::vector<int> suspected;
  for (int rank = 0; rank < world_size(); ++rank) {
    Peer& peer = *peers_[rank];
    if (is_here(rank) || !peer.met.load(std::memory_order_relaxed) || has_ended(rank)) continue;
    const uint32_t activity = wire_->activity(rank);
    std::unique_lock lock(segments_mutex_);
    const bool awaited = wire_->awaits(rank) || peer.witness || !peer.expected.expired();
    // What came before the first look may be old: since then its host may have said that it is stopped.
    if (peer.activity.value_or(activity) != activity) peer.life->hear();
    peer.activity = activity;
    const auto action = peer.life->look(now, awaited);
    const bool stopped = peer.life->is_stopped();
    const bool still = peer.life->state() != PeerState::kAlive;
    lock.unlock();
    if (still) suspected.push_back(rank);
    if (action == PeerLiveness::Action::kGiveUp) given_up.push_back(rank);
    if (action == PeerLiveness::Action::kAskHost) {
      ask_host_of(rank);
      for (const int witness : witnesses_of(rank)) peers_[witness]->witness = true;
    }
    const bool asks = action == PeerLiveness::Action::kHeartbeat || action == PeerLiveness::Action::kAskHost;
    if (!asks || stopped) continue;  // what a stopped rank was asked before it answers when it goes on
    ControlMessage heartbeat;
    heartbeat.kind = ControlMessage::Kind::kHeartbeat;
    heartbeat.number = 1;
    tell(rank, heartbeat);
  }
  for (const int rank : given_up) give_up(rank);
  // Witnesses are needed as long as one of their host is suspected, and those that have not answered are in doubt
  // themselves.
  std::vector<bool> in_doubt(layout_.hosts.size());
  for (const int rank : suspected) {
    if (!has_ended(rank)) in_doubt[layout_.host_of[rank]] = true;
  }
  for (size_t host = 0; host < layout_.hosts.size(); ++host) {
    if (in_doubt[host]) continue;
    for (const int rank : layout_.hosts[host]) {
      Peer& peer = *peers_[rank];
      if (!peer.witness) continue;
      std::lock_guard lock(segments_mutex_);
      peer.witness = peer.life->silence() >= PeerLiveness::interval(heartbeat_timeout_);
    }
  }
}

/// The other ranks of its host that may know how a rank is.
std::vector<int> HostTransport::witnesses_of(int rank) const {
  std::vector<int> witnesses;
  for (const int fellow : layout_.hosts[layout_.host_of[rank]]) {
    if (fellow != rank && !has_ended(fellow) && witnesses.size() < kMostWitnesses)
      witnesses.push_back(fellow);
  }
  return witnesses;
}

void HostTransport::ask_host_of(int rank) {
  ControlMessage question;
  question.kind = ControlMessage::Kind::kAskForState;
  question.rank = rank;
  for (const int witness : witnesses_of(rank)) tell(witness, question);
}

void HostTransport::tell_state_of(int neighbour, int to) {
  if (has_ended(neighbour)) return tell(to, end_message(neighbour));
  ControlMessage answer;
  answer.kind = ControlMessage::Kind::kState;
  answer.rank = neighbour;
  answer.number = is_stopped(neighbour) ? 1 : 0;
  if (answer.number != 0) answer.set_text(in_action(neighbour));
  tell(to, answer);
}

void HostTransport::hear_state(const ControlMessage& message) {
  std::lock_guard lock(segments_mutex_);
  Peer& peer = *peers_[message.rank];
  peer.life->hear_of(message.number != 0);
  peer.stopped_in = message.get_text();
  ++peer.host_answers;
  segments_changed_.notify_all();
}

void HostTransport::give_up(int rank) {
  std::vector<int> silent{rank};
  std::vector<int> speaking;
  std::string text;
  {
    std::lock_guard lock(segments_mutex_);
    for (const int fellow : layout_.hosts[layout_.host_of[rank]]) {
      const Peer& peer = *peers_[fellow];
      const PeerState state = peer.life->state();
      if (fellow == rank || state == PeerState::kEnded || state == PeerState::kOwnFault) continue;
      if (state == PeerState::kAlive && !peer.witness) continue;  // was not asked
      const bool speaks = peer.life->silence() < PeerLiveness::interval(heartbeat_timeout_);
      (speaks ? speaking : silent).push_back(job_rank(fellow));
    }
    text = "is unreachable: silent for " + format_silence(*peers_[rank]->life);
  }
  silent.front() = job_rank(rank);
  std::sort(silent.begin(), silent.end());
  if (!speaking.empty()) {
    text += ", though " + name_ranks(speaking) + on_host(rank) +
            (speaking.size() > 1 ? " answer" : " answers") + "; its process hangs, or the way to it is cut";
  } else if (silent.size() > 1) {
    text += ", as are all that were asked" + on_host(rank) + " (" + name_ranks(silent) +
            "); that host is lost or stopped, or the wire is cut";
  } else {
    text += "; it is stopped, its host is lost, or the wire is cut (no other rank of its host can say which)";
  }
  if (const std::string action = in_or_after_action(rank); !action.empty())
    text += "; " + name_ranks({job_rank(rank)}) + " was" + action;
  LOCKSTEP_LOG(kWarning) << describe(rank) << ' ' << text;
  hear_end(rank, text, /*certain=*/false);
  // If only the way from there is cut, it hears why.
  ControlMessage farewell;
  farewell.kind = ControlMessage::Kind::kLeaveJob;
  farewell.number = 1;
  farewell.set_text("has given up " + describe(rank) + ", from which nothing came: the way there may be cut");
  tell(rank, farewell);
  // What waits for it ends, once all is heard that it had told before.
  wire_->abandon(rank, text);
}

/// Of the engine, in any thread.
void HostTransport::hear_loss(int rank, const std::string& reason) {
  const bool no_descriptor = has_no_descriptor_left();
  LOCKSTEP_LOG(kInfo) << "the connection to " << describe(rank) << " is lost: " << reason;
  std::lock_guard lock(segments_mutex_);
  Peer& peer = *peers_[rank];
  if (no_descriptor) {
    peer.own_fault = "which has no file descriptor left (" + reason + "; raise ulimit -n, or close files)";
  }
  peer.life->end(peer.own_fault.empty() ? PeerState::kEnded : PeerState::kOwnFault);
}

/// Of one whose next control message this process could not receive: it could not tell the following ones from it.
void HostTransport::lose_by_own_fault(int rank) {
  {
    std::lock_guard lock(segments_mutex_);
    peers_[rank]->own_fault =
        "which could not receive what it says: no memory, or a message of another version of Lockstep";
  }
  wire_->abandon(rank, "a control message could not be received");
}

}  // namespace lockstep::transport
