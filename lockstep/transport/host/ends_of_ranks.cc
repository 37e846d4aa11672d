#include <mutex>
#include <sstream>
#include <utility>

#include <lockstep/base/log.h>
#include <lockstep/base/ranks.h>
#include <lockstep/rendezvous/exit_status_table.h>
#include <lockstep/rendezvous/process_stat.h>
#include <lockstep/rendezvous/process_watch.h>
#include <lockstep/transport/host/groups/group_members.h>
#include <lockstep/transport/host/host_transport.h>
#include <lockstep/transport/host/process_header.h>

// Of HostTransport: how ranks end, and what they are called.
namespace lockstep::transport {
namespace {

/// With those that share a lost rank's host and may know more: until they see that it has ended, find out how, and have told it.
constexpr std::chrono::nanoseconds kPatienceForEnd = kLongestEnding + std::chrono::seconds(1);

/// Between two questions to a rank's host how that rank has ended.
constexpr auto kEndQuestionInterval = std::chrono::milliseconds(300);

}  // namespace

std::string HostTransport::describe_end(int rank) {
  Peer& peer = *peers_[rank];
  if (!is_here(rank)) {
    // The rank's neighbours notice its end as soon as this one, and know more of it. They tell this one, or one of its
    // own neighbours; on a busy host that takes a while. All threads that ask wait for the same time. Of a rank that is
    // alone on its host there is nothing to hear.
    std::unique_lock lock(segments_mutex_);
    if (peer.patience_for_end.is_never()) {
      peer.least_patience_for_end = Deadline::after(std::chrono::milliseconds(is_alone(rank) ? 0 : 300));
      peer.patience_for_end = Deadline::after(kPatienceForEnd);
      peer.question_for_end = peer.least_patience_for_end;
    }
    while (true) {
      const EndOfFarRank* heard = peer.end.empty() ? end_of_far_rank(rank) : nullptr;
      if (heard != nullptr) peer.end = heard->text.data();
      if (!peer.end.empty()) return describe(rank) + " " + peer.end;
      if (peer.least_patience_for_end.expired() &&
          (peer.patience_for_end.expired() || witnesses_of(rank).empty())) {
        break;
      }
      if (peer.question_for_end.expired()) {
        // They have told their counterparts, which may have ended before they heard it. Again, for they may not know it yet.
        peer.question_for_end = Deadline::after(kEndQuestionInterval);
        lock.unlock();  // hear_loss() takes it
        ask_host_of(rank);
        lock.lock();
        continue;
      }
      segments_changed_.wait_for(lock, std::chrono::milliseconds(10));
    }
    // What its host says comes first: the rank may have ended at a moment at which this process had no descriptor, too.
    if (!peer.own_fault.empty()) {
      return describe(rank) + " is out of reach by a fault of " + describe(rank_) + ", " + peer.own_fault;
    }
    lock.unlock();
    return describe_loss(rank, wire_->lost(rank).value_or("its host says that it has ended"));
  }
  std::byte* first = peer.bases[0].load(std::memory_order_acquire);
  if (peer.goes_on.load(std::memory_order_relaxed) && note_kind(header_of(first)) == EndKind::kRunning)
    return describe(rank) + " has closed its connections, and its process goes on" + in_action(rank);
  return describe(rank) + " " + describe_process_end(header_of(first), peer.link.pid, peer.link.pidfd.get()) +
         in_action(rank);
}

std::string HostTransport::in_action(int rank) const {
  if (!is_here(rank)) {
    std::lock_guard lock(segments_mutex_);
    return peers_[rank]->stopped_in;
  }
  const std::string action = TellingAction::describe(action_of(rank));
  return action.empty() ? "" : " in " + action;
}

uint64_t HostTransport::action_of(int rank) const {
  const Peer& peer = *peers_[rank];
  if (!is_here(rank)) return peer.action.load(std::memory_order_relaxed);
  return header_of(peer.bases[0].load(std::memory_order_acquire))
      .phases.action.load(std::memory_order_relaxed);
}

void HostTransport::hear_action(int rank, uint64_t action) {
  if (action != 0) peers_[rank]->action.store(action, std::memory_order_relaxed);
}

void HostTransport::forget_actions() {
  for (const auto& peer : peers_) peer->action.store(0, std::memory_order_relaxed);
}

std::string HostTransport::in_or_after_action(int rank) const {
  const std::string action = is_here(rank) ? "" : TellingAction::describe(action_of(rank));
  return action.empty() ? "" : " in or after " + action;
}

bool HostTransport::is_alone(int rank) const {
  return layout_.hosts[layout_.host_of[rank]].size() == 1;
}

std::string HostTransport::describe_loss(int rank, const std::string& reason) const {
  const std::string action = in_or_after_action(rank);
  return describe(rank) + " is lost: " + reason + (action.empty() ? "" : "; it was" + action) +
         "; its process has ended" +
         (is_alone(rank) ? ", its host is lost or the wire is cut (no other rank is on its host to say how)"
                         : " or the wire is cut");
}

std::string HostTransport::describe(int rank) const {
  return "rank " + std::to_string(job_rank(rank)) + of_the_job() + " (pid " + std::to_string(pid_of(rank)) +
         on_host(rank) + ")";
}

std::string HostTransport::describe(const std::vector<int>& ranks) const {
  std::vector<int> named;
  std::ostringstream pids;
  for (const int rank : ranks) {
    named.push_back(job_rank(rank));
    if (ranks.size() <= 4) pids << (pids.tellp() > 0 ? ", " : " (pid ") << pid_of(rank) << on_host(rank);
  }
  std::ostringstream text;
  text << name_ranks(named) << of_the_job() << pids.str();
  if (pids.tellp() > 0) text << ')';
  return text.str();
}

std::string HostTransport::on_host(int rank) const {
  const std::string& host = host_name(rank);
  return host.empty() ? "" : " on " + host;
}

bool HostTransport::is_stopped(int rank) const {
  if (!is_here(rank)) {
    std::lock_guard lock(segments_mutex_);
    return peers_[rank]->life->is_stopped();
  }
  const auto stat = read_process_stat(pid_of(rank));
  return stat && stat->is_stopped();
}

void HostTransport::note_culprit(int rank) const {
  const auto table = ExitStatusTable::from_environment();
  if (!table) return;
  if (is_here(rank)) {
    table->record_culprit(pid_of(rank));
  } else {
    table->record_far_culprit(rank);
  }
}

void HostTransport::mark_ended(int rank) {
  {
    std::lock_guard lock(segments_mutex_);
    if (peers_[rank]->ended.exchange(true, std::memory_order_acq_rel)) return;
    segments_changed_.notify_all();
  }
  LOCKSTEP_LOG(kDebug) << "rank " << rank << " is gone";
  if (is_here(rank)) neighbours_ended_.fetch_add(1, std::memory_order_relaxed);
  endings_.fetch_add(1, std::memory_order_acq_rel);
  std::lock_guard lock(groups_mutex_);
  for (GroupMembers* group : groups_) group->wake_waiters();
}

/// The first words stay; that its end is certain after all is noted beside them.
void HostTransport::hear_end(int rank, const std::string& end, bool certain) {
  // Before the lock: the arena, which has one of its own, takes this one when it grows.
  ProcessHeader& header = header_of(arena_->segment(0)->data());
  std::lock_guard lock(segments_mutex_);
  Peer& peer = *peers_[rank];
  if (!peer.end.empty() && (peer.end_is_certain || !certain)) return;
  if (peer.end.empty()) peer.end = end;
  peer.end_is_certain = certain;
  peer.life->end(PeerState::kEnded);
  segments_changed_.notify_all();
  for (EndOfFarRank& free : header.far_ends) {
    if (free.rank.load(std::memory_order_relaxed) >= 0) continue;
    end.copy(free.text.data(), free.text.size() - 1);
    free.certain = certain;
    free.rank.store(rank, std::memory_order_release);
    return;
  }
}

bool HostTransport::end_is_certain(int rank) const {
  if (is_here(rank)) return true;
  {
    std::lock_guard lock(segments_mutex_);
    if (peers_[rank]->end_is_certain) return true;
  }
  const EndOfFarRank* heard = end_of_far_rank(rank);
  return heard != nullptr && heard->certain;
}

/// What this rank or a neighbour has heard, what is certain first; or null.
const EndOfFarRank* HostTransport::end_of_far_rank(int rank) const {
  const EndOfFarRank* uncertain = nullptr;
  for (const int neighbour : layout_.neighbours()) {
    std::byte* first = peers_[neighbour]->bases[0].load(std::memory_order_acquire);
    for (const EndOfFarRank& heard : header_of(first).far_ends) {
      if (heard.rank.load(std::memory_order_acquire) != rank) continue;
      if (heard.certain) return &heard;
      if (uncertain == nullptr) uncertain = &heard;
    }
  }
  return uncertain;
}

/// How long those that share a lost rank's host may take to say more of it than this rank can.
std::chrono::nanoseconds HostTransport::patience_with_neighbours_of(int rank) const {
  return is_alone(rank) ? std::chrono::nanoseconds(0) : kPatienceForEnd;
}

ControlMessage HostTransport::end_message(int neighbour) {
  ControlMessage message;
  message.kind = ControlMessage::Kind::kEndOfFellow;
  message.rank = neighbour;
  const std::string who = describe(neighbour);
  message.set_text(describe_end(neighbour).substr(who.size() + 1));
  return message;
}

/// Each rank has a counterpart on each host, so all hosts hear of it.
void HostTransport::tell_end_of(int rank) {
  if (!wire_ || !is_here(rank)) return;
  std::call_once(peers_[rank]->end_told, [&] {
    const ControlMessage message = end_message(rank);
    for (const int counterpart : layout_.counterparts()) {
      if (!has_ended(counterpart)) tell(counterpart, message);
    }
  });
}

void HostTransport::say_goodbye() {
  ControlMessage message;
  message.kind = ControlMessage::Kind::kLeaveJob;
  message.set_text(describe_good_end());
  for (int rank = 0; rank < world_size(); ++rank) {
    if (!is_here(rank) && peers_[rank]->met.load(std::memory_order_relaxed) && !has_ended(rank))
      tell(rank, message);
  }
}

}  // namespace lockstep::transport
