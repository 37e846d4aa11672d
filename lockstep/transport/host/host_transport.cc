#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <poll.h>
#include <sys/eventfd.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>
#include <climits>

#include <lockstep/base/environment.h>
#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/standard_streams.h>
#include <lockstep/rendezvous/process_watch.h>
#include <lockstep/transport/host/first_messages.h>
#include <lockstep/transport/host/groups/group_members.h>
#include <lockstep/transport/host/host_transport.h>
#include <lockstep/transport/host/process_header.h>
#include <lockstep/transport/local_socket.h>

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

/// From another one's word that a rank has ended until that holds, if its connection does not end before.
constexpr auto kReportPatience = std::chrono::seconds(2);

/// Between two tries to send a segment for which there was no room, in milliseconds.
constexpr int kSendInterval = 10;

}  // namespace

HostTransport::HostTransport(int rank, int world_size, const Options& options)
    : rank_(rank),
      job_ranks_(options.job_ranks),
      layout_(GroupLayout::make(options.host_of.empty() ? std::vector<int>(world_size, 0) : options.host_of,
                                rank)),
      heartbeat_timeout_(options.heartbeat_timeout),
      arena_(std::make_shared<Arena>(options.segment_bytes, sizeof(ProcessHeader))) {
  TORCH_INTERNAL_ASSERT(layout_.size() == world_size);
  for (int peer = 0; peer < world_size; ++peer) {
    peers_.push_back(std::make_unique<Peer>());
    if (spans_hosts()) peers_[peer]->host = options.host_names.at(static_cast<size_t>(options.host_of[peer]));
    if (!is_here(peer)) peers_[peer]->life.emplace(heartbeat_timeout_);
  }
  auto* header = new (arena_->segment(0)->data()) ProcessHeader;
  header->pid = ::getpid();
  header->rank = job_rank(rank);
  header->index = rank;
  header->world_size = world_size;
  header->magic = ProcessHeader::kMagic;
  peers_[rank]->link.pid = ::getpid();
  install(rank, 0, arena_->segment(0));
}

std::shared_ptr<HostTransport> HostTransport::connect(c10d::Store& store, int rank, int world_size,
                                                      const Deadline& deadline, const Options& options) {
  open_standard_streams();  // Python's store comes from elsewhere
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
      FirstMessages with;
      with.own = transport->describe(rank) + ", by " + transport->wire_->describe();
      with.describe = [&](int peer) {
        return transport->describe(peer) + ", by " + transport->peers_[peer]->wire;
      };
      with.patience = [&](int peer) { return transport->patience_with_neighbours_of(peer); };
      with.look = look;
      with.silence_limit = transport->heartbeat_timeout_;
      with.generation = Generation::read(environment::text);
      for (const int peer : transport->layout_.counterparts()) transport->meet(peer);
      pass_first_messages(*transport->wire_, transport->layout_.counterparts(), deadline, with);
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
    TORCH_CHECK_WITH(DistBackendError, header_of(links[peer].segment->data()).magic == ProcessHeader::kMagic,
                     "rank ", peer,
                     " shares memory of another layout; do all ranks run the same version of Lockstep?");
    transport->install(peer, 0, links[peer].segment);
    transport->peers_[peer]->link = std::move(links[peer]);
  }
  watch_process_end(header_of(transport->arena_->segment(0)->data()));
  HostTransport* self = transport.get();
  transport->arena_->set_listener([self](uint32_t index, const std::shared_ptr<Segment>& segment) {
    self->publish_segment(index, segment);
  });
  if (options.names_stragglers) transport->launcher_ = ExitStatusTable::from_environment();
  transport->start_monitor(/*watches=*/true);
  transport->begin_telling_phases(options.names_stragglers);
  header_of(transport->arena_->segment(0)->data())
      .first_pid.store(transport->pid_of(transport->layout_.neighbours().front()), std::memory_order_release);
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
  if (audience_) end_telling_phases(audience_);
  arena_->set_listener(nullptr);
  ProcessHeader& header = header_of(arena_->segment(0)->data());
  leave_note(header, EndKind::kLeft, 0);
  unwatch_process_end(header);
  if (wire_) say_goodbye();
  if (monitor_.running()) {
    stopping_.store(true, std::memory_order_release);
    ::eventfd_write(wake_event_.get(), 1);
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
    if (!peers_[peer]->link.socket || send_segment(peers_[peer]->link, index, *segment)) continue;
    const int error = errno;
    if (peer_has_closed(error)) continue;  // the monitor's business
    TORCH_CHECK_WITH(DistBackendError, may_send_later(error), "rank ", job_rank(rank_),
                     " can't share its memory with ", describe(static_cast<int>(peer)), ": ",
                     std::strerror(error),
                     "; does a security profile forbid to send descriptors, or is memory short?");
    {
      std::lock_guard lock(segments_mutex_);
      unsent_.push_back({static_cast<int>(peer), index, segment});
    }
    ::eventfd_write(wake_event_.get(), 1);
  }
}

bool HostTransport::send_unsent() {
  std::lock_guard lock(segments_mutex_);
  std::erase_if(unsent_, [this](const Unsent& one) {
    return send_segment(peers_[one.rank]->link, one.index, *one.segment) || peer_has_closed(errno);
  });
  return !unsent_.empty();
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
  LOCKSTEP_THROW_TIMEOUT(
      "segment " + std::to_string(segment) + " of rank " + std::to_string(rank) +
      " did not arrive within the timeout; is that rank stopped, or its limit on open files "
      "(ulimit -n), which bounds the descriptors in flight of all its user's processes, too low?");
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
  wake_event_.reset(::eventfd(0, EFD_CLOEXEC));
  TORCH_CHECK_WITH(DistBackendError, wake_event_, "eventfd failed: ", std::strerror(errno));
  for (int rank = 0; control_ && rank < world_size(); ++rank) {
    if (!is_here(rank)) control_->receive_from(rank);
  }
  monitor_.start("lockstep-watch", [this, watches] { monitor(watches); });
}

void HostTransport::monitor(bool watches) {
  const auto interval = PeerLiveness::interval(heartbeat_timeout_);
  auto look = wire_ ? Deadline::after(interval) : Deadline::never();
  // No later than that after a wait has become a long one.
  const auto waits_interval =
      std::min<std::chrono::nanoseconds>(heartbeat_timeout_ / 4, std::chrono::seconds(1));
  auto look_at_waits = launcher_ ? Deadline::after(waits_interval) : Deadline::never();
  while (true) {
    const bool has_unsent = send_unsent();
    std::vector<pollfd> polls{{wake_event_.get(), POLLIN, 0},
                              {control_ ? control_->event_fd() : -1, POLLIN, 0}};
    std::vector<int> ranks{-1, -1};
    for (const int rank : layout_.neighbours()) {
      const Peer& peer = *peers_[rank];
      if (!watches || rank == rank_ || peer.ended.load(std::memory_order_relaxed)) continue;
      // A closed one would be ready each time.
      polls.push_back({closing_.count(rank) != 0 ? -1 : peer.link.socket.get(), POLLIN, 0});
      polls.push_back({peer.link.pidfd.get(), POLLIN, 0});  // a negative descriptor is ignored
      ranks.insert(ranks.end(), {rank, rank});
    }
    const Deadline& first = look.remaining() < look_at_waits.remaining() ? look : look_at_waits;
    int timeout = first.is_never() ? -1 : first.poll_milliseconds();
    for (const auto* deadlines : {&reported_, &closing_}) {
      for (const auto& [rank, deadline] : *deadlines)
        timeout = std::min(timeout < 0 ? INT_MAX : timeout, deadline.poll_milliseconds());
    }
    if (has_unsent) timeout = timeout < 0 ? kSendInterval : std::min(timeout, kSendInterval);
    if (::poll(polls.data(), polls.size(), timeout) < 0) {
      if (errno == EINTR) continue;
      // A program has set RLIMIT_NOFILE to fewer than these, and poll(2) refuses them together.
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      for (pollfd& each : polls) ::poll(&each, 1, 0);
    }
    if (polls[0].revents != 0) {
      eventfd_t ignored = 0;
      ::eventfd_read(wake_event_.get(), &ignored);
    }
    const bool stops = stopping_.load(std::memory_order_acquire);
    // What has come counts also when this rank stops: how another host's has ended, its neighbours read here.
    if (stops && wire_) wire_->progress();
    if (polls[1].revents != 0 || (stops && control_)) {
      control_->hear([this](int from, const ControlMessage& message) { hear(from, message); },
                     [this](int lost, bool by_own_fault) {
                       if (by_own_fault) lose_by_own_fault(lost);
                       mark_ended(lost);
                     });
    }
    if (stops) {
      if (has_told_wait_) launcher_->record_wait(std::nullopt);
      return;
    }
    std::erase_if(reported_, [this](const auto& reported) {
      if (!reported.second.expired()) return false;
      wire_->abandon(reported.first, "its host says that it has ended");
      mark_ended(reported.first);
      return true;
    });
    if (look.expired()) {
      look_at_far_ranks();
      look = Deadline::after(interval);
    }
    if (look_at_waits.expired()) {
      look_at_own_waits();
      look_at_waits = Deadline::after(waits_interval);
    }
    for (size_t i = 2; i < polls.size(); i += 2) {
      const auto closing = closing_.find(ranks[i]);
      bool ended = polls[i + 1].revents != 0;
      if (!ended && closing != closing_.end() && closing->second.expired()) {
        peers_[ranks[i]]->goes_on.store(true, std::memory_order_relaxed);
        ended = true;
      }
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
        ended = ended || (!open && !awaits_end_of(ranks[i]));
      }
      if (ended) {
        closing_.erase(ranks[i]);
        failpoint::here("notice_end");
        // First the other hosts: once an operation fails by it here, what that tells them ends their ranks, which would
        // not hear any more how it ended.
        tell_end_of(ranks[i]);
        mark_ended(ranks[i]);
      }
    }
  }
}

/// Whether the end of a neighbour that has closed its sockets is awaited, to say how it ended; notes until when. Not here, for
/// this thread has heartbeats to answer meanwhile.
bool HostTransport::awaits_end_of(int rank) {
  const Peer& peer = *peers_[rank];
  const bool noted = note_kind(header_of(peer.bases[0].load(std::memory_order_acquire))) != EndKind::kRunning;
  if (noted || !peer.link.pidfd) return false;
  closing_.emplace(rank, Deadline::after(kLongestEnding));
  return true;
}

/// The peer lives all the same. What needs the memory fails, with this reason.
void HostTransport::note_unmapped(int rank, uint32_t index, const std::string& reason) {
  LOCKSTEP_LOG(kError) << "rank " << rank_ << " can't use memory of rank " << rank << ": " << reason;
  std::lock_guard lock(segments_mutex_);
  peers_[rank]->unmapped[index] = reason;
  segments_changed_.notify_all();
}

// ---- other hosts

void HostTransport::make_wire(const Options& options) {
  TORCH_CHECK_VALUE(world_size() <= wire::Engine::kMaxRanks, "a job over several hosts has at most ",
                    wire::Engine::kMaxRanks, " ranks, not ", world_size());
  TORCH_INTERNAL_ASSERT(options.make_engine, "a job over several hosts needs an engine");
  wire_ = std::make_unique<wire::Wire>(
      options.make_engine(rank_), [this](int rank, const std::string& reason) { hear_loss(rank, reason); });
  control_ = std::make_unique<ControlChannel>(*wire_, world_size());
}

void HostTransport::tell(int rank, const ControlMessage& message) {
  meet(rank);
  control_->send(rank, message);
}

void HostTransport::hear(int from, const ControlMessage& message) {
  {
    std::lock_guard lock(segments_mutex_);
    peers_[from]->life->hear();
  }
  const bool is_of_job = message.rank >= 0 && message.rank < world_size();
  switch (message.kind) {
    case ControlMessage::Kind::kFailure:
    case ControlMessage::Kind::kLeave:
    case ControlMessage::Kind::kMeet:
      return control_->pass_on(from, message);
    case ControlMessage::Kind::kLeaveJob:
      hear_end(from, message.get_text(), /*certain=*/message.number == 0);
      mark_ended(from);
      // The end of its connection ends the requests with it, but may not come through.
      reported_.emplace(from, Deadline::after(kReportPatience));
      return;
    case ControlMessage::Kind::kEndOfFellow:
      if (!is_of_job || is_here(message.rank)) return;
      hear_end(message.rank, message.get_text(), /*certain=*/true);
      // What it had sent before may still be on its way: the own connection to it says when nothing more comes. For a rank
      // without one, others' word holds after a while.
      reported_.emplace(message.rank, Deadline::after(kReportPatience));
      return;
    case ControlMessage::Kind::kAskForCause:
      return tell_cause(from);
    case ControlMessage::Kind::kCause:
      return hear_cause(from, message);
    case ControlMessage::Kind::kHeartbeat: {
      if (message.number == 0) return hear_action(from, message.sequence);  // an answer
      ControlMessage answer;
      answer.kind = ControlMessage::Kind::kHeartbeat;
      answer.sequence = action_of(rank_);
      return tell(from, answer);
    }
    case ControlMessage::Kind::kAskForState:
      if (is_of_job && is_here(message.rank)) tell_state_of(message.rank, from);
      return;
    case ControlMessage::Kind::kState:
      if (is_of_job && !is_here(message.rank)) hear_state(message);
      return;
    case ControlMessage::Kind::kPhases:
      if (is_of_job && !is_here(message.rank)) hear_phases(message.rank, message.get_text());
      return;
  }
}

}  // namespace lockstep::transport
