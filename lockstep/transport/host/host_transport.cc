#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <poll.h>
#include <sstream>
#include <sys/eventfd.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>
#include <climits>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/log.h>
#include <lockstep/base/ranks.h>
#include <lockstep/rendezvous/exit_status_table.h>
#include <lockstep/rendezvous/process_stat.h>
#include <lockstep/transport/host/end_note.h>
#include <lockstep/transport/host/group_members.h>
#include <lockstep/transport/host/host_transport.h>

#ifdef __SANITIZE_THREAD__
extern "C" void AnnotateBenignRaceSized(const char* file, int line, const volatile void* memory, size_t bytes,
                                        const char* reason);
#endif

namespace lockstep::transport {
namespace {

/// ThreadSanitizer does not see what another process does. Where that process frees memory and uses it for something else,
/// two threads of this one would seem to race there. Ranks as threads, of which it sees everything, keep their reports.
void expect_no_reports_of(const Segment& of_another_process) {
#ifdef __SANITIZE_THREAD__
  AnnotateBenignRaceSized(__FILE__, __LINE__, of_another_process.data(), of_another_process.size(),
                          "memory of another process");
#else
  static_cast<void>(of_another_process);
#endif
}

constexpr uint64_t kHeaderMagic = 0x335054534b434f4cULL;  // "LOCKSTP3"
/// Of the messages by which two hosts meet, on the control channel; control messages count from 0.
constexpr uint32_t kFirstMeeting = uint32_t{1} << 31;
/// With a host that is asked for the cause of a wait.
constexpr auto kAnswerPatience = std::chrono::seconds(2);

ProcessHeader& header_of(std::byte* first_segment) {
  return *reinterpret_cast<ProcessHeader*>(first_segment);
}

}  // namespace

HostTransport::HostTransport(int rank, int world_size, const Options& options)
    : rank_(rank),
      job_ranks_(options.job_ranks),
      layout_(GroupLayout::make(options.host_of.empty() ? std::vector<int>(world_size, 0) : options.host_of,
                                rank)),
      arena_(std::make_shared<Arena>(options.segment_bytes, sizeof(ProcessHeader))) {
  TORCH_INTERNAL_ASSERT(layout_.size() == world_size);
  for (int peer = 0; peer < world_size; ++peer) {
    peers_.push_back(std::make_unique<Peer>());
    if (spans_hosts()) peers_[peer]->host = options.host_names.at(static_cast<size_t>(options.host_of[peer]));
  }
  auto* header = new (arena_->segment(0)->data()) ProcessHeader;
  header->magic = kHeaderMagic;
  header->pid = ::getpid();
  peers_[rank]->link.pid = ::getpid();
  install(rank, 0, arena_->segment(0));
}

std::shared_ptr<HostTransport> HostTransport::connect(c10d::Store& store, int rank, int world_size,
                                                      const Deadline& deadline, const Options& options) {
  std::shared_ptr<HostTransport> transport(new HostTransport(rank, world_size, options));
  OtherHosts others;
  if (transport->spans_hosts()) {
    others.host_of = transport->layout_.host_of;
    others.make_address = [&] {
      transport->make_wire(options);
      return transport->wire_->describe() + '\n' + transport->wire_->address();
    };
    others.meet = [&](const std::vector<PeerLink>& links, const std::function<void()>& look) {
      for (int peer = 0; peer < world_size; ++peer) {
        if (transport->is_here(peer)) continue;
        transport->peers_[peer]->link.pid = links[peer].pid;
        const std::string& text = links[peer].wire_address;
        const size_t end = std::min(text.find('\n'), text.size());
        transport->peers_[peer]->wire = text.substr(0, end);
        transport->wire_->connect(peer, text.substr(std::min(end + 1, text.size())));
      }
      transport->meet_hosts(look, deadline);
    };
    others.look = [&, suspicion = Deadline::never()]() mutable {
      for (const int peer : transport->layout_.counterparts()) {
        const auto reason = transport->wire_->lost(peer);
        if (!reason) continue;
        if (suspicion.is_never()) suspicion = Deadline::after(transport->patience_with_neighbours_of(peer));
        TORCH_CHECK_WITH(DistBackendError, !suspicion.expired(), transport->describe_loss(peer, *reason));
      }
    };
  }
  auto links = connect_peers(store, rank, world_size, *transport->arena_->segment(0), deadline,
                             options.met_at, others);
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank || !transport->is_here(peer)) continue;
    TORCH_CHECK_WITH(DistBackendError, header_of(links[peer].segment->data()).magic == kHeaderMagic, "rank ",
                     peer,
                     " shares memory of another layout; do all ranks run the same version of Lockstep?");
    transport->install(peer, 0, links[peer].segment);
    transport->peers_[peer]->link = std::move(links[peer]);
  }
  watch_process_end(header_of(transport->arena_->segment(0)->data()));
  HostTransport* self = transport.get();
  transport->arena_->set_listener([self](uint32_t index, const std::shared_ptr<Segment>& segment) {
    self->publish_segment(index, segment);
  });
  transport->start_monitor(/*watches=*/true);
  failpoint::here("transport_connected");
  return transport;
}

std::vector<std::shared_ptr<HostTransport>> HostTransport::connect_threads(int world_size,
                                                                           const Options& options) {
  std::vector<std::shared_ptr<HostTransport>> transports;
  for (int rank = 0; rank < world_size; ++rank) {
    transports.push_back(std::shared_ptr<HostTransport>(new HostTransport(rank, world_size, options)));
  }
  for (auto& transport : transports) {
    for (auto& peer : transports) {
      transport->peers_[peer->rank_]->link.pid = ::getpid();
      if (!transport->is_here(peer->rank_)) continue;
      transport->fellow_threads_.push_back(peer.get());
      if (peer != transport) transport->install(peer->rank_, 0, peer->arena_->segment(0));
    }
    HostTransport* self = transport.get();
    transport->arena_->set_listener([self](uint32_t index, const std::shared_ptr<Segment>& segment) {
      self->publish_segment(index, segment);
    });
  }
  if (world_size == 0 || !transports.front()->spans_hosts()) return transports;
  for (auto& transport : transports) transport->make_wire(options);
  for (auto& transport : transports) {
    for (auto& peer : transports) {
      if (!transport->is_here(peer->rank_)) transport->wire_->connect(peer->rank_, peer->wire_->address());
    }
  }
  for (auto& transport : transports) transport->start_monitor(/*watches=*/false);
  return transports;
}

HostTransport::~HostTransport() {
  if (fork_guard_.in_forked_child()) return;
  arena_->set_listener(nullptr);
  ProcessHeader& header = header_of(arena_->segment(0)->data());
  leave_note(header, EndKind::kLeft, 0);
  unwatch_process_end(header);
  if (wire_) say_goodbye();
  if (monitor_.running()) {
    ::eventfd_write(stop_event_.get(), 1);
    monitor_.join();
  }
  wire_.reset();  // what it tells when it ends reaches the rest of this
}

void HostTransport::install(int rank, uint32_t index, std::shared_ptr<Segment> segment) {
  if (rank != rank_ && fellow_threads_.empty()) expect_no_reports_of(*segment);
  std::lock_guard lock(segments_mutex_);
  Peer& peer = *peers_[rank];
  peer.sizes[index] = segment->size();
  // Release: pairs with address(), which then may read the size, and through the pointer.
  peer.bases[index].store(segment->data(), std::memory_order_release);
  peer.segments.push_back(std::move(segment));
  segments_changed_.notify_all();
}

void HostTransport::publish_segment(uint32_t index, const std::shared_ptr<Segment>& segment) {
  install(rank_, index, segment);
  if (!fellow_threads_.empty()) {
    for (HostTransport* fellow : fellow_threads_) {
      if (fellow != this) fellow->install(rank_, index, segment);
    }
    return;
  }
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    // A peer that is gone is the monitor's business.
    if (peers_[peer]->link.socket) send_segment(peers_[peer]->link, index, *segment);
  }
}

std::byte* HostTransport::mapped_address(int rank, const MemoryReference& reference) const {
  const Peer& peer = *peers_[rank];
  if (reference.segment >= Arena::kMaxSegments) return nullptr;
  std::byte* base = peer.bases[reference.segment].load(std::memory_order_acquire);
  if (base == nullptr || reference.offset + sizeof(uint64_t) > peer.sizes[reference.segment]) return nullptr;
  return base + reference.offset;
}

std::byte* HostTransport::address(int rank, const MemoryReference& reference, const Deadline& deadline,
                                  size_t bytes) {
  TORCH_INTERNAL_ASSERT(is_here(rank));
  Peer& peer = *peers_[rank];
  const uint32_t segment = reference.segment;
  TORCH_CHECK_WITH(DistBackendError, segment < Arena::kMaxSegments, "rank ", rank,
                   " gave a reference to segment ", segment, ", which no arena has");
  const auto within = [&](std::byte* base) {
    const size_t size = peer.sizes[segment];
    TORCH_CHECK_WITH(DistBackendError, bytes <= size && reference.offset <= size - bytes, "rank ", rank,
                     " gave a reference to byte ", reference.offset, " of segment ", segment, ", which has ",
                     size, " bytes");
    return base + reference.offset;
  };
  auto& base = peer.bases[segment];
  if (std::byte* mapped = base.load(std::memory_order_acquire)) return within(mapped);
  std::unique_lock lock(segments_mutex_);
  const bool arrived = segments_changed_.wait_for(lock, deadline.remaining(), [&] {
    return base.load(std::memory_order_acquire) != nullptr || peer.ended.load(std::memory_order_acquire) ||
           peer.unmapped.count(segment) != 0;
  });
  if (std::byte* mapped = base.load(std::memory_order_acquire)) return within(mapped);
  const auto unmapped = peer.unmapped.find(segment);
  TORCH_CHECK_WITH(DistBackendError, unmapped == peer.unmapped.end(), "rank ", job_rank(rank_),
                   " can't use the memory of rank ", job_rank(rank), ": ", unmapped->second);
  TORCH_CHECK_WITH(DistBackendError, !arrived, describe_end(rank));
  LOCKSTEP_THROW_TIMEOUT("segment " + std::to_string(segment) + " of rank " + std::to_string(rank) +
                         " did not arrive within the timeout");
}

std::string HostTransport::describe_end(int rank) const {
  Peer& peer = *peers_[rank];
  if (!is_here(rank)) {
    // The rank's neighbours notice its end as soon as this one, and know more of it. They tell this one, or one of its
    // own neighbours.
    std::unique_lock lock(segments_mutex_);
    const auto patience = Deadline::after(std::chrono::milliseconds(peer.asked_for_end ? 0 : 300));
    peer.asked_for_end = true;
    while (true) {
      if (peer.end.empty()) peer.end = end_of_far_rank(rank);
      if (!peer.end.empty()) return describe(rank) + " " + peer.end;
      if (patience.expired()) break;
      segments_changed_.wait_for(lock, std::chrono::milliseconds(10));
    }
    lock.unlock();
    return describe_loss(rank, wire_->lost(rank).value_or("its host says that it has ended"));
  }
  std::byte* first = peer.bases[0].load(std::memory_order_acquire);
  return describe(rank) + " " + describe_process_end(header_of(first), peer.link.pid, peer.link.pidfd.get());
}

std::string HostTransport::describe_loss(int rank, const std::string& reason) const {
  return describe(rank) + " is lost: " + reason + "; its process has ended or the wire is cut";
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
  const std::string& host = peers_[rank]->host;
  return host.empty() ? "" : " on " + host;
}

bool HostTransport::is_stopped(int rank) const {
  if (!is_here(rank)) {
    std::lock_guard lock(segments_mutex_);
    return peers_[rank]->stopped;
  }
  const auto stat = read_process_stat(pid_of(rank));
  return stat && (stat->state == 'T' || stat->state == 't');
}

WaitRecords& HostTransport::wait_records() const {
  return header_of(arena_->segment(0)->data()).waits;
}

int HostTransport::cause_of_waiting(const std::vector<int>& ranks) {
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
  std::lock_guard lock(segments_mutex_);
  last_cause_.emplace(cause, Deadline::after(kAnswerPatience));
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
    const std::vector<int> awaited = awaited_by(at);
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
    const uint64_t reference = record.word.load(std::memory_order_acquire);
    const int peer = record.peer.load(std::memory_order_relaxed);
    const int owner = record.owner.load(std::memory_order_relaxed);
    if (reference == 0 || peer < 0 || peer >= world_size() || owner < 0 || owner >= world_size()) continue;
    const std::byte* word = mapped_address(owner, unpack_reference(reference));
    // What it waits for has come, and it has not gone on: it is not held up by others.
    if (word == nullptr || reinterpret_cast<const std::atomic<uint64_t>*>(word)->load(
                               std::memory_order_acquire) >= record.value.load(std::memory_order_relaxed)) {
      continue;
    }
    awaited.push_back(peer);
  }
  return awaited;
}

/// Which rank keeps one on another host waiting, as that one says; nothing if it does not answer.
std::optional<int> HostTransport::ask_for_cause(int rank) {
  Peer& peer = *peers_[rank];
  std::unique_lock lock(segments_mutex_);
  const uint32_t before = peer.answers;
  // An answer serves all threads that ask; one that does not come is waited for once, not for each of many
  // messages.
  if (!std::exchange(peer.asked, true)) {
    peer.patience = Deadline::after(kAnswerPatience);
    lock.unlock();
    ControlMessage question;
    question.kind = ControlMessage::Kind::kAskForCause;
    tell(rank, question);
    lock.lock();
  }
  segments_changed_.wait_for(lock, peer.patience.remaining(), [&] {
    return peer.answers != before || peer.ended.load(std::memory_order_acquire);
  });
  return peer.answers != before ? std::optional(peer.cause) : std::nullopt;
}

void HostTransport::tell_cause(int rank) {
  ControlMessage answer;
  answer.kind = ControlMessage::Kind::kCause;
  // Ranks that wait for each other are all the cause: then it is the first for which this one waits. One that has just
  // given up was held up until then; that it has failed may not be known yet where the question comes from.
  const std::vector<int> awaited = awaited_by(rank_);
  if (!awaited.empty()) {
    answer.rank = cause_known_here(awaited);
  } else {
    std::lock_guard lock(segments_mutex_);
    answer.rank = last_cause_ && !last_cause_->second.expired() ? last_cause_->first : rank_;
  }
  answer.number = is_here(answer.rank) && is_stopped(answer.rank) ? 1 : 0;
  tell(rank, answer);
}

void HostTransport::hear_cause(int from, const ControlMessage& message) {
  if (message.rank < 0 || message.rank >= world_size()) return;
  std::lock_guard lock(segments_mutex_);
  Peer& peer = *peers_[from];
  peer.asked = false;
  ++peer.answers;
  peer.cause = message.rank;
  peers_[message.rank]->stopped = message.number != 0;
  segments_changed_.notify_all();
}

void HostTransport::note_culprit(int rank) const {
  if (!is_here(rank)) return;  // its own host's launcher has it
  if (const auto table = ExitStatusTable::from_environment()) table->record_culprit(pid_of(rank));
}

void HostTransport::add_group(GroupMembers* group) {
  std::lock_guard lock(groups_mutex_);
  groups_.insert(group);
}

void HostTransport::remove_group(GroupMembers* group) {
  std::lock_guard lock(groups_mutex_);
  groups_.erase(group);
}

void HostTransport::retire(std::function<bool()> unused, std::function<void()> release) {
  {
    std::lock_guard lock(retired_mutex_);
    retired_.push_back({std::move(unused), std::move(release)});
  }
  sweep_retired();
}

void HostTransport::sweep_retired() {
  std::lock_guard lock(retired_mutex_);
  std::erase_if(retired_, [](const Retired& retired) {
    if (!retired.unused()) return false;
    retired.release();
    return true;
  });
}

void HostTransport::start_monitor(bool watches) {
  if (world_size() == 1) return;
  stop_event_.reset(::eventfd(0, EFD_CLOEXEC));
  TORCH_CHECK_WITH(DistBackendError, stop_event_, "eventfd failed: ", std::strerror(errno));
  if (wire_) {
    inbox_event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    TORCH_CHECK_WITH(DistBackendError, inbox_event_, "eventfd failed: ", std::strerror(errno));
    for (int rank = 0; rank < world_size(); ++rank) {
      if (is_here(rank)) continue;
      peers_[rank]->incoming = std::make_unique<ControlMessage>();
      receive_control(rank);
    }
  }
  monitor_.start("lockstep-watch", [this, watches] { monitor(watches); });
}

void HostTransport::monitor(bool watches) {
  while (true) {
    std::vector<pollfd> polls{{stop_event_.get(), POLLIN, 0}, {inbox_event_.get(), POLLIN, 0}};
    std::vector<int> ranks{-1, -1};
    for (const int rank : layout_.neighbours()) {
      const Peer& peer = *peers_[rank];
      if (!watches || rank == rank_ || peer.ended.load(std::memory_order_relaxed)) continue;
      polls.push_back({peer.link.socket.get(), POLLIN, 0});
      polls.push_back({peer.link.pidfd.get(), POLLIN, 0});  // a negative descriptor is ignored
      ranks.insert(ranks.end(), {rank, rank});
    }
    int timeout = -1;
    for (const auto& [rank, deadline] : reported_) {
      timeout = std::min(timeout < 0 ? INT_MAX : timeout, deadline.poll_milliseconds());
    }
    if (::poll(polls.data(), polls.size(), timeout) < 0) continue;  // EINTR
    if (polls[0].revents != 0) return;
    if (polls[1].revents != 0) hear_control();
    std::erase_if(reported_, [this](const auto& reported) {
      if (!reported.second.expired()) return false;
      mark_ended(reported.first);
      return true;
    });
    for (size_t i = 2; i < polls.size(); i += 2) {
      bool ended = polls[i + 1].revents != 0;
      if (polls[i].revents != 0 || ended) {
        bool open = true;
        // All that has come, for a peer that has ended sends no second wake-up; also what has come since
        // poll(2) looked at the socket, which it does before it looks whether the process has ended.
        while (auto received = receive_segment(peers_[ranks[i]]->link, open)) {
          if (received->segment) {
            install(ranks[i], received->index, std::move(received->segment));
          } else {
            note_unmapped(ranks[i], received->index, received->problem);
          }
        }
        ended |= !open;
      }
      if (ended) {
        mark_ended(ranks[i]);
        if (wire_) tell_end_of(ranks[i]);
      }
    }
  }
}

/// The peer lives all the same. What needs the memory fails, with this reason.
void HostTransport::note_unmapped(int rank, uint32_t index, const std::string& reason) {
  LOCKSTEP_LOG(kError) << "rank " << rank_ << " can't use memory of rank " << rank << ": " << reason;
  std::lock_guard lock(segments_mutex_);
  peers_[rank]->unmapped[index] = reason;
  segments_changed_.notify_all();
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

// ---- other hosts

void HostTransport::make_wire(const Options& options) {
  TORCH_CHECK_VALUE(world_size() <= wire::Engine::kMaxRanks, "a job over several hosts has at most ",
                    wire::Engine::kMaxRanks, " ranks, not ", world_size());
  TORCH_INTERNAL_ASSERT(options.make_engine, "a job over several hosts needs an engine");
  wire_ =
      std::make_unique<wire::Wire>(options.make_engine(rank_), [this](int rank, const std::string& reason) {
        LOCKSTEP_LOG(kInfo) << "the connection to " << describe(rank) << " is lost: " << reason;
      });
}

/// How long those that share a lost rank's host may take to say more of it than this rank can.
std::chrono::nanoseconds HostTransport::patience_with_neighbours_of(int rank) const {
  return std::chrono::seconds(layout_.hosts[layout_.host_of[rank]].size() > 1 ? 2 : 0);
}

/// Passes a small and a full-size message both ways between this rank and its counterparts, so that what is wrong with
/// the network shows at the start.
void HostTransport::meet_hosts(const std::function<void()>& look, const Deadline& deadline) {
  constexpr size_t kSmall = 64;
  constexpr size_t kFull = size_t{64} << 10;
  constexpr auto kLookInterval = std::chrono::milliseconds(200);
  constexpr auto kLongestHead = std::chrono::seconds(5);
  struct Meeting {
    int rank;
    std::vector<std::byte> incoming;
    wire::Handle small, full;
  };
  const std::vector<std::byte> outgoing(kSmall + kFull);
  Doorbell bell;
  std::vector<Meeting> meetings;
  std::vector<wire::Handle> requests;
  for (const int rank : layout_.counterparts()) {
    meet(rank);
    meetings.push_back({rank, std::vector<std::byte>(kSmall + kFull), nullptr, nullptr});
    std::byte* incoming = meetings.back().incoming.data();
    meetings.back().small = wire_->receive(rank, {0, kFirstMeeting}, incoming, kSmall, &bell);
    meetings.back().full = wire_->receive(rank, {0, kFirstMeeting + 1}, incoming + kSmall, kFull, &bell);
    requests.push_back(wire_->send(rank, {0, kFirstMeeting}, outgoing.data(), kSmall, &bell));
    requests.push_back(wire_->send(rank, {0, kFirstMeeting + 1}, outgoing.data() + kSmall, kFull, &bell));
    requests.push_back(meetings.back().small);
    requests.push_back(meetings.back().full);
  }
  struct Cancel {
    ~Cancel() {
      for (const auto& request : requests) wire.cancel(request);
    }
    wire::Wire& wire;
    const std::vector<wire::Handle>& requests;
  } cancel{*wire_, requests};
  const auto fail = [&](const Meeting& meeting, const std::string& what) {
    std::string text = describe(rank_) + ", by " + wire_->describe() + ", and " + describe(meeting.rank) +
                       ", by " + peers_[meeting.rank]->wire + ", can't pass messages: " + what;
    if (meeting.small->status() == wire::RequestStatus::kSucceeded && !meeting.full->done()) {
      text += "; small messages pass, but not " + std::to_string(kFull >> 10) +
              " KiB: do all interfaces between the two hosts have the same MTU?";
    }
    return text;
  };
  // Ahead of the deadline, at which those that have met would only say that this rank is late.
  const auto verdict = Deadline::after(
      deadline.remaining() - std::min<std::chrono::nanoseconds>(deadline.remaining() / 10, kLongestHead));
  const auto is_over = [](const wire::Handle& request) { return request->done(); };
  const WaitPolicy policy{.spins = 0, .yields = 20};
  while (true) {
    const auto all_over = [&] { return std::all_of(requests.begin(), requests.end(), is_over); };
    const auto drive = [&] {
      wire_->progress();
      return all_over();
    };
    wait_until(bell, policy, Deadline::after(verdict.remaining(kLookInterval)), drive,
               [&] { wire_->before_sleep(); });
    for (const auto& request : requests) {
      if (!request->done() || request->status() == wire::RequestStatus::kSucceeded) continue;
      const auto meeting = std::find_if(meetings.begin(), meetings.end(),
                                        [&](const Meeting& one) { return one.rank == request->peer(); });
      const auto patience = Deadline::after(patience_with_neighbours_of(request->peer()));
      while (!patience.expired()) {
        look();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      C10_THROW_ERROR(
          DistBackendError,
          fail(*meeting, wire_->lost(request->peer()).value_or("the wire has failed on this rank")));
    }
    if (all_over()) return;
    look();
    if (!verdict.expired()) continue;
    for (const Meeting& meeting : meetings) {
      if (meeting.full->done()) continue;
      LOCKSTEP_THROW_TIMEOUT(fail(meeting,
                                  "nothing has come by the timeout; does a firewall lie between them, or are "
                                  "these the wrong interfaces?"));
    }
    LOCKSTEP_THROW_TIMEOUT(fail(meetings.front(), "what was sent is not through at the timeout"));
  }
}

void HostTransport::tell(int rank, const ControlMessage& message) {
  meet(rank);
  const auto kept = std::make_shared<const ControlMessage>(message);
  const uint32_t number = peers_[rank]->told.fetch_add(1, std::memory_order_relaxed);
  wire_->send(rank, {0, number}, kept.get(), sizeof *kept, nullptr, [kept](wire::RequestStatus) {});
}

void HostTransport::receive_control(int from) {
  Peer& peer = *peers_[from];
  wire_->receive(from, {0, peer.heard++}, peer.incoming.get(), sizeof *peer.incoming, nullptr,
                 [this, from](wire::RequestStatus status) {
                   if (status == wire::RequestStatus::kCancelled) return;  // this rank ends
                   std::lock_guard lock(inbox_mutex_);
                   inbox_.emplace_back(from, status == wire::RequestStatus::kSucceeded);
                   unheard_.fetch_add(1, std::memory_order_relaxed);
                   ::eventfd_write(inbox_event_.get(), 1);
                 });
}

void HostTransport::hear_control() {
  eventfd_t ignored = 0;
  ::eventfd_read(inbox_event_.get(), &ignored);
  std::vector<std::pair<int, bool>> inbox;
  {
    std::lock_guard lock(inbox_mutex_);
    inbox.swap(inbox_);
  }
  for (const auto& [from, has_come] : inbox) {
    // An end counts only now, when all is heard that the rank had told before: why a group has failed, say.
    if (has_come) {
      const ControlMessage message = *peers_[from]->incoming;
      meet(from);
      receive_control(from);
      hear(from, message);
    } else {
      mark_ended(from);
    }
    unheard_.fetch_sub(1, std::memory_order_release);
  }
}

void HostTransport::await_heard() {
  wire_->await_told();
  while (unheard_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
}

void HostTransport::hear(int from, const ControlMessage& message) {
  switch (message.kind) {
    case ControlMessage::Kind::kFailure:
    case ControlMessage::Kind::kLeave:
    case ControlMessage::Kind::kMeet: {
      std::lock_guard lock(listeners_mutex_);
      const auto listener = listeners_.find(message.group);
      if (listener != listeners_.end()) return listener->second->on_control(from, message);
      if (message.kind != ControlMessage::Kind::kMeet) return;
      // A group that was closed here.
      ControlMessage answer;
      if (const auto failed = last_words_.find(message.group); failed != last_words_.end()) {
        answer = failed->second;
        answer.group = message.number;
        tell(from, answer);
      }
      answer.kind = ControlMessage::Kind::kLeave;
      answer.group = message.number;
      return tell(from, answer);
    }
    case ControlMessage::Kind::kLeaveJob:
      hear_end(from, message.get_text());
      return mark_ended(from);
    case ControlMessage::Kind::kEndOfFellow:
      if (message.rank < 0 || message.rank >= world_size() || is_here(message.rank)) return;
      hear_end(message.rank, message.get_text());
      // What it had sent before may still be on its way: the own connection to it says when nothing more comes. For a rank
      // without one, others' word holds after a while.
      reported_.emplace(message.rank, Deadline::after(std::chrono::seconds(2)));
      return;
    case ControlMessage::Kind::kAskForCause:
      return tell_cause(from);
    case ControlMessage::Kind::kCause:
      return hear_cause(from, message);
  }
}

void HostTransport::hear_end(int rank, const std::string& end) {
  std::lock_guard lock(segments_mutex_);
  if (!peers_[rank]->end.empty()) return;
  peers_[rank]->end = end;
  segments_changed_.notify_all();
  for (EndOfFarRank& free : header_of(arena_->segment(0)->data()).far_ends) {
    if (free.rank.load(std::memory_order_relaxed) >= 0) continue;
    end.copy(free.text.data(), free.text.size() - 1);
    free.rank.store(rank, std::memory_order_release);
    return;
  }
}

/// What a neighbour has heard; or empty.
std::string HostTransport::end_of_far_rank(int rank) const {
  for (const int neighbour : layout_.neighbours()) {
    std::byte* first = peers_[neighbour]->bases[0].load(std::memory_order_acquire);
    for (const EndOfFarRank& heard : header_of(first).far_ends) {
      if (heard.rank.load(std::memory_order_acquire) == rank) return heard.text.data();
    }
  }
  return "";
}

/// Each rank has a counterpart on each host, so all hosts hear of it.
void HostTransport::tell_end_of(int neighbour) {
  ControlMessage message;
  message.kind = ControlMessage::Kind::kEndOfFellow;
  message.rank = neighbour;
  const std::string who = describe(neighbour);
  message.set_text(describe_end(neighbour).substr(who.size() + 1));
  for (const int rank : layout_.counterparts()) {
    if (!has_ended(rank)) tell(rank, message);
  }
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

uint32_t HostTransport::add_listener(ControlListener& listener) {
  std::lock_guard lock(listeners_mutex_);
  TORCH_CHECK_WITH(DistBackendError, next_number_ <= wire::Tag::kMaxChannel - kChannelsPerGroup, "rank ",
                   job_rank(rank_),
                   " has made so many groups over several hosts that no channel is left for another");
  const uint32_t number = next_number_;
  next_number_ += kChannelsPerGroup;
  listeners_[number] = &listener;
  return number;
}

void HostTransport::remove_listener(uint32_t number, const std::optional<ControlMessage>& last_words) {
  std::lock_guard lock(listeners_mutex_);
  listeners_.erase(number);
  if (last_words) last_words_.emplace(number, *last_words);
}

}  // namespace lockstep::transport
