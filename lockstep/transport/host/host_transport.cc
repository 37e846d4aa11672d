#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/log.h>
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

constexpr uint64_t kHeaderMagic = 0x325054534b434f4cULL;  // "LOCKSTP2"

ProcessHeader& header_of(std::byte* first_segment) {
  return *reinterpret_cast<ProcessHeader*>(first_segment);
}

}  // namespace

HostTransport::HostTransport(int rank, int world_size, const Options& options)
    : rank_(rank),
      job_ranks_(options.job_ranks),
      arena_(std::make_shared<Arena>(options.segment_bytes, sizeof(ProcessHeader))) {
  for (int peer = 0; peer < world_size; ++peer) peers_.push_back(std::make_unique<Peer>());
  auto* header = new (arena_->segment(0)->data()) ProcessHeader;
  header->magic = kHeaderMagic;
  header->pid = ::getpid();
  peers_[rank]->link.pid = ::getpid();
  install(rank, 0, arena_->segment(0));
}

std::shared_ptr<HostTransport> HostTransport::connect(c10d::Store& store, int rank, int world_size,
                                                      const Deadline& deadline, const Options& options) {
  std::shared_ptr<HostTransport> transport(new HostTransport(rank, world_size, options));
  auto links =
      connect_peers(store, rank, world_size, *transport->arena_->segment(0), deadline, options.met_at);
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank) continue;
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
  transport->start_monitor();
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
      transport->fellow_threads_.push_back(peer.get());
      if (peer != transport) transport->install(peer->rank_, 0, peer->arena_->segment(0));
    }
    HostTransport* self = transport.get();
    transport->arena_->set_listener([self](uint32_t index, const std::shared_ptr<Segment>& segment) {
      self->publish_segment(index, segment);
    });
  }
  return transports;
}

HostTransport::~HostTransport() {
  if (fork_guard_.in_forked_child()) return;
  arena_->set_listener(nullptr);
  ProcessHeader& header = header_of(arena_->segment(0)->data());
  leave_note(header, EndKind::kLeft, 0);
  unwatch_process_end(header);
  if (monitor_.running()) {
    ::eventfd_write(stop_event_.get(), 1);
    monitor_.join();
  }
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
  const Peer& peer = *peers_[rank];
  std::byte* first = peer.bases[0].load(std::memory_order_acquire);
  return describe(rank) + " " + describe_process_end(header_of(first), peer.link.pid, peer.link.pidfd.get());
}

std::string HostTransport::describe(int rank) const {
  return "rank " + std::to_string(job_rank(rank)) + of_the_job() + " (pid " + std::to_string(pid_of(rank)) +
         ")";
}

bool HostTransport::is_stopped(int rank) const {
  const auto stat = read_process_stat(pid_of(rank));
  return stat && (stat->state == 'T' || stat->state == 't');
}

WaitRecords& HostTransport::wait_records() const {
  return header_of(arena_->segment(0)->data()).waits;
}

int HostTransport::cause_of_waiting(const std::vector<int>& ranks) {
  int waits_for_none = -1;
  std::vector<bool> seen(world_size());
  std::vector<int> open(ranks.rbegin(), ranks.rend());
  while (!open.empty()) {
    const int at = open.back();
    open.pop_back();
    if (seen[at]) continue;
    seen[at] = true;
    // Threads that play ranks are stopped all or none.
    if (at != rank_ && fellow_threads_.empty() && (has_ended(at) || is_stopped(at))) return at;
    bool waits = at == rank_;  // the rank that asks waits
    const ProcessHeader& header = header_of(peers_[at]->bases[0].load(std::memory_order_acquire));
    for (const WaitRecord& record : header.waits) {
      const uint64_t reference = record.word.load(std::memory_order_acquire);
      const int peer = record.peer.load(std::memory_order_relaxed);
      const int owner = record.owner.load(std::memory_order_relaxed);
      if (reference == 0 || peer < 0 || peer >= world_size() || owner < 0 || owner >= world_size()) continue;
      std::byte* word = mapped_address(owner, unpack_reference(reference));
      // What it waits for has come, and it has not gone on: it is not held up by others.
      if (word == nullptr || reinterpret_cast<const std::atomic<uint64_t>*>(word)->load(
                                 std::memory_order_acquire) >= record.value.load(std::memory_order_relaxed)) {
        continue;
      }
      waits = true;
      open.push_back(peer);
    }
    if (!waits && waits_for_none < 0) waits_for_none = at;
  }
  return waits_for_none < 0 ? ranks.front() : waits_for_none;
}

void HostTransport::note_culprit(int rank) const {
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

void HostTransport::start_monitor() {
  if (world_size() == 1) return;
  stop_event_.reset(::eventfd(0, EFD_CLOEXEC));
  TORCH_CHECK_WITH(DistBackendError, stop_event_, "eventfd failed: ", std::strerror(errno));
  monitor_.start("lockstep-watch", [this] { monitor(); });
}

void HostTransport::monitor() {
  while (true) {
    std::vector<pollfd> polls{{stop_event_.get(), POLLIN, 0}};
    std::vector<int> ranks{-1};
    for (int rank = 0; rank < world_size(); ++rank) {
      const Peer& peer = *peers_[rank];
      if (rank == rank_ || peer.ended.load(std::memory_order_relaxed)) continue;
      polls.push_back({peer.link.socket.get(), POLLIN, 0});
      polls.push_back({peer.link.pidfd.get(), POLLIN, 0});  // a negative descriptor is ignored
      ranks.insert(ranks.end(), {rank, rank});
    }
    if (::poll(polls.data(), polls.size(), -1) < 0) continue;  // EINTR
    if (polls[0].revents != 0) return;
    for (size_t i = 1; i < polls.size(); i += 2) {
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
      if (ended) mark_ended(ranks[i]);
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
  LOCKSTEP_LOG(kDebug) << "rank " << rank << " is gone";
  {
    std::lock_guard lock(segments_mutex_);
    peers_[rank]->ended.store(true, std::memory_order_release);
    segments_changed_.notify_all();
  }
  endings_.fetch_add(1, std::memory_order_acq_rel);
  std::lock_guard lock(groups_mutex_);
  for (GroupMembers* group : groups_) group->wake_waiters();
}

}  // namespace lockstep::transport
