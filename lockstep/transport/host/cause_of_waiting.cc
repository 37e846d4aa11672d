#include <algorithm>
#include <iterator>
#include <utility>

#include <lockstep/transport/host/host_transport.h>
#include <lockstep/transport/host/process_header.h>

// Of HostTransport: which rank keeps others waiting.
namespace lockstep::transport {
namespace {

/// With a host that is asked for the cause of a wait.
constexpr auto kAnswerPatience = std::chrono::seconds(2);
/// With the others of its host, once it has not answered within that time.
constexpr auto kHostPatience = std::chrono::milliseconds(300);

}  // namespace

WaitRecords& HostTransport::wait_records() const {
  return header_of(arena_->segment(0)->data()).waits;
}

int HostTransport::cause_of_waiting(const std::vector<int>& ranks) {
  GivenUpWait& given_up = header_of(arena_->segment(0)->data()).given_up;
  given_up.note({ranks.front(), false});  // asking takes time, in which this rank is in no wait
  const int cause = find_cause(ranks);
  given_up.note({cause, is_stopped(cause)});
  return cause;
}

// What has kept this rank waiting stays noted, and one that is found here is noted where nothing is: these ranks did not keep
// it waiting for certain.
int HostTransport::find_stopped(const std::vector<int>& ranks) {
  GivenUpWait& given_up = header_of(arena_->segment(0)->data()).given_up;
  const auto found = [&](int rank) {
    given_up.renew();
    if (!given_up.recent_cause()) given_up.note({rank, true});
    return rank;
  };
  std::vector<int> here;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(here),
               [this](int rank) { return is_here(rank); });
  // Those that are stopped themselves come before those that they wait for, maybe in other groups.
  for (const int rank : here) {
    if (is_stopped(rank)) return found(rank);
  }
  // Of ranks that go on, none is more the cause than another.
  if (!here.empty()) {
    if (const int cause = find_cause(here); is_stopped(cause)) return found(cause);
  }
  const auto patience = Deadline::after(kAnswerPatience);
  for (const int rank : ranks) {
    if (is_here(rank)) continue;
    if (patience.expired()) break;
    given_up.renew();
    if (const int cause = find_cause({rank}); is_stopped(cause)) return found(cause);
  }
  given_up.renew();
  return -1;
}

int HostTransport::find_cause(const std::vector<int>& ranks) {
  int cause = cause_known_here(ranks);
  std::vector<bool> asked(world_size());
  while (!is_here(cause) && !has_ended(cause)) {
    asked[cause] = true;
    const auto answer = ask_for_cause(cause);
    if (!answer) break;
    const int next = is_here(*answer) ? cause_known_here({*answer}) : *answer;
    if (next == rank_ || asked[next]) break;  // they wait for each other
    cause = next;
  }
  return cause;
}

/// The same without asking: of ranks on other hosts it is not known what they wait for.
int HostTransport::cause_known_here(const std::vector<int>& ranks) const {
  int waits_for_none = -1;
  std::vector<bool> seen(world_size());
  std::vector<int> open(ranks.rbegin(), ranks.rend());
  while (!open.empty()) {
    const int at = open.back();
    open.pop_back();
    if (seen[at]) continue;
    seen[at] = true;
    if (!is_here(at)) {
      if (has_ended(at)) return at;
      if (waits_for_none < 0) waits_for_none = at;
      continue;
    }
    // Threads that play ranks are stopped all or none.
    if (at != rank_ && fellow_threads_.empty() && (has_ended(at) || is_stopped(at))) return at;
    std::vector<int> awaited = awaited_by(at);
    if (awaited.empty() && at != rank_) {
      if (const auto cause = given_up_by(at)) awaited.push_back(*cause);
    }
    open.insert(open.end(), awaited.begin(), awaited.end());
    // The rank that asks waits.
    if (awaited.empty() && at != rank_ && waits_for_none < 0) waits_for_none = at;
  }
  return waits_for_none < 0 ? ranks.front() : waits_for_none;
}

/// The ranks for which one of this host waits, in whatever groups, as it has recorded.
std::vector<int> HostTransport::awaited_by(int rank) const {
  std::vector<int> awaited;
  const ProcessHeader& header = header_of(peers_[rank]->bases[0].load(std::memory_order_acquire));
  for (const WaitRecord& record : header.waits) {
    if (!is_over(record)) awaited.push_back(record.peer.load(std::memory_order_relaxed));
  }
  return awaited;
}

/// Whether none is recorded there, or what it waits for has come, and it has not gone on: it is not held up by others.
bool HostTransport::is_over(const WaitRecord& record) const {
  const uint64_t reference = record.word.load(std::memory_order_acquire);
  const int peer = record.peer.load(std::memory_order_relaxed);
  const int owner = record.owner.load(std::memory_order_relaxed);
  if (reference == 0 || peer < 0 || peer >= world_size() || owner < 0 || owner >= world_size()) return true;
  const std::byte* word = mapped_address(owner, unpack_reference(reference));
  return word == nullptr || reinterpret_cast<const std::atomic<uint64_t>*>(word)->load(
                                std::memory_order_acquire) >= record.value.load(std::memory_order_relaxed);
}

/// Which rank has kept one of this host waiting until it gave up just now. That it has failed may not be known yet.
std::optional<int> HostTransport::given_up_by(int rank) const {
  const auto cause =
      header_of(peers_[rank]->bases[0].load(std::memory_order_acquire)).given_up.recent_cause();
  return cause && cause->rank < world_size() ? std::optional(cause->rank) : std::nullopt;
}

bool HostTransport::has_found_stopped(int finder, int rank) const {
  const auto cause =
      header_of(peers_[finder]->bases[0].load(std::memory_order_acquire)).given_up.recent_cause();
  return cause && cause->rank == rank && cause->stopped;
}

/// Which rank keeps one on another host waiting, as that one says; nothing if it does not answer.
std::optional<int> HostTransport::ask_for_cause(int rank) {
  Peer& peer = *peers_[rank];
  std::unique_lock lock(segments_mutex_);
  const uint32_t before = peer.answers;
  const uint32_t host_before = peer.host_answers;
  // An answer serves all threads that ask; one that does not come is waited for once, not for each of many
  // messages.
  const bool asks = !std::exchange(peer.asked, true);
  if (asks) peer.patience = Deadline::after(kAnswerPatience);
  const bool asks_host_alone = peer.patience.expired();
  lock.unlock();
  if (asks) {
    ControlMessage question;
    question.kind = ControlMessage::Kind::kAskForCause;
    tell(rank, question);
  }
  if (asks || asks_host_alone) ask_host_of(rank);  // a stopped rank does not answer
  const bool has_host = !witnesses_of(rank).empty();
  lock.lock();
  const auto patience = asks_host_alone && has_host ? Deadline::after(kHostPatience) : peer.patience;
  segments_changed_.wait_for(lock, patience.remaining(), [&] {
    return peer.answers != before || peer.life->is_stopped() || peer.ended.load(std::memory_order_acquire) ||
           (asks_host_alone && peer.host_answers != host_before);
  });
  return peer.answers != before ? std::optional(peer.cause) : std::nullopt;
}

void HostTransport::tell_cause(int rank) {
  ControlMessage answer;
  answer.kind = ControlMessage::Kind::kCause;
  // Ranks that wait for each other are all the cause: then it is the first for which this one waits.
  const std::vector<int> awaited = awaited_by(rank_);
  answer.rank = awaited.empty() ? given_up_by(rank_).value_or(rank_) : cause_known_here(awaited);
  answer.sequence = action_of(answer.rank);
  answer.number = is_stopped(answer.rank) ? 1 : 0;
  if (answer.number != 0) answer.set_text(in_action(answer.rank));
  tell(rank, answer);
}

void HostTransport::hear_cause(int from, const ControlMessage& message) {
  if (message.rank < 0 || message.rank >= world_size()) return;
  hear_action(message.rank, message.sequence);
  std::lock_guard lock(segments_mutex_);
  Peer& peer = *peers_[from];
  peer.asked = false;
  ++peer.answers;
  peer.cause = message.rank;
  // That a rank runs is known on its own host alone.
  const bool knows = message.number != 0 || layout_.host_of[from] == layout_.host_of[message.rank];
  if (!is_here(message.rank) && knows) {
    peers_[message.rank]->life->hear_of(message.number != 0);
    peers_[message.rank]->stopped_in = message.get_text();
  }
  segments_changed_.notify_all();
}

}  // namespace lockstep::transport
