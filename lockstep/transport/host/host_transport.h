#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/transport/host/arena.h>
#include <lockstep/transport/host/peer_links.h>
#include <lockstep/transport/host/wait_record.h>

namespace c10d {
class Store;
}

namespace lockstep::transport {

class GroupMembers;

/// The ranks of one host as one process sees them: all ranks' memory mapped, all ranks' processes watched.
///
/// One per process and job (world); the groups' channels stand on it. It holds this rank's arena, a mapping
/// of every peer's segments, and one monitor thread, which maps further segments as they arrive and notices
/// when a peer ends. Knows nothing of operations. Thread-safe. Lifetime: channels and arena memory keep what
/// they need alive; when the last goes, the peers are told that this rank left in good order.
class HostTransport : public std::enable_shared_from_this<HostTransport> {
 public:
  struct Options {
    size_t segment_bytes = size_t{64} << 20;  // arena growth step; pages cost nothing until touched
    std::vector<int> job_ranks = {};  // what messages call the ranks; empty: 0, 1, … as everywhere else
    std::string met_at = {};          // an all-gather to which all ranks have come: see store_all_gather()
  };

  /// Joins the other processes of the job through the store. Collective; throws as connect_peers() does.
  static std::shared_ptr<HostTransport> connect(c10d::Store& store, int rank, int world_size,
                                                const Deadline& deadline, const Options& options);
  /// Ranks as threads of this process over one mapping, so that ThreadSanitizer sees the protocol. Nobody is
  /// watched.
  static std::vector<std::shared_ptr<HostTransport>> connect_threads(int world_size, const Options& options);

  ~HostTransport();

  int rank() const { return rank_; }
  /// What messages call a rank: where this transport's ranks are only some of the job's.
  int job_rank(int rank) const { return job_ranks_.empty() ? rank : job_ranks_[rank]; }
  int world_size() const { return static_cast<int>(peers_.size()); }
  /// How many ranks there still are, this one among them.
  int living_count() const { return world_size() - static_cast<int>(endings()); }
  /// Says that the program calls ranks by other numbers than the job did at its start: messages, which keep
  /// to the job's, say so from now on.
  void set_renumbered() { renumbered_.store(true, std::memory_order_relaxed); }
  /// " of the job" then, else "": what stands behind "rank 2" in messages.
  const char* of_the_job() const { return renumbered_.load(std::memory_order_relaxed) ? " of the job" : ""; }
  Arena& arena() { return *arena_; }
  const std::shared_ptr<Arena>& shared_arena() const { return arena_; }

  /// Where `bytes` of a rank's memory are mapped here. Waits for a segment that is on its way; throws
  /// DistTimeoutError if it does not arrive, c10::DistBackendError if its owner has ended, the bytes lie
  /// outside of it, or this process could not map it.
  std::byte* address(int rank, const MemoryReference& reference, const Deadline& deadline, size_t bytes = 1);

  /// Counts the peers that have ended or left so far: changes whenever has_ended() of any peer does.
  uint32_t endings() const { return endings_.load(std::memory_order_acquire); }
  bool has_ended(int rank) const { return peers_[rank]->ended.load(std::memory_order_acquire); }
  /// "rank 2 (pid 4242) was killed by signal 9 (SIGKILL)". Takes up to 50 ms for a peer that has just ended.
  std::string describe_end(int rank) const;
  int pid_of(int rank) const { return peers_[rank]->link.pid; }
  /// "rank 2 (pid 4242)".
  std::string describe(int rank) const;
  /// Whether the rank's process is stopped by a signal or a debugger, as far as /proc says.
  bool is_stopped(int rank) const;
  /// The rank that keeps `ranks`, at least one, from going on: one that has ended or is stopped, if it is
  /// among them or they wait for such a one by way of others, in whatever groups; else one that waits for no
  /// rank; else the first of them. A guess when several threads of a rank wait at once, or ranks move
  /// meanwhile.
  int cause_of_waiting(const std::vector<int>& ranks);
  WaitRecords& wait_records() const;
  /// Tells the launcher that this rank made an operation fail, for its report.
  void note_culprit(int rank) const;

  /// Groups register to have their sleeping waiters woken when a peer ends; GroupMembers does this itself.
  void add_group(GroupMembers* group);
  void remove_group(GroupMembers* group);

  /// Calls `release` once `unused()` holds, now or when a later group closes, or at the end: for memory that
  /// a closed group's peers may still touch.
  void retire(std::function<bool()> unused, std::function<void()> release);

  bool in_forked_child() const { return fork_guard_.in_forked_child(); }

 private:
  struct Peer {
    PeerLink link;
    std::atomic<bool> ended{false};
    // Base addresses of the peer's segments; null until mapped. Written by the monitor thread (release), read
    // by all.
    std::array<std::atomic<std::byte*>, Arena::kMaxSegments> bases{};
    std::array<size_t, Arena::kMaxSegments> sizes{};  // in bytes; written before the base
    std::vector<std::shared_ptr<Segment>> segments;   // keeps the mappings; monitor thread only
    std::map<uint32_t, std::string>
        unmapped;  // segments that could not be mapped, and why; under segments_mutex_
  };
  struct Retired {
    std::function<bool()> unused;
    std::function<void()> release;
  };

  HostTransport(int rank, int world_size, const Options& options);
  void install(int rank, uint32_t index, std::shared_ptr<Segment> segment);
  /// Of a word; null unless it lies in a segment that is mapped.
  std::byte* mapped_address(int rank, const MemoryReference& reference) const;
  void publish_segment(uint32_t index, const std::shared_ptr<Segment>& segment);
  void start_monitor();
  void monitor();
  void note_unmapped(int rank, uint32_t index, const std::string& reason);
  void mark_ended(int rank);
  void sweep_retired();

  const int rank_;
  const std::vector<int> job_ranks_;
  ForkGuard fork_guard_;
  std::shared_ptr<Arena> arena_;
  std::vector<std::unique_ptr<Peer>> peers_;    // by rank, the own one too
  std::vector<HostTransport*> fellow_threads_;  // connect_threads only
  std::atomic<uint32_t> endings_{0};
  std::atomic<bool> renumbered_{false};

  std::mutex segments_mutex_;
  std::condition_variable segments_changed_;

  std::mutex groups_mutex_;
  std::unordered_set<GroupMembers*> groups_;

  std::mutex retired_mutex_;
  std::vector<Retired> retired_;

  UniqueFd stop_event_;
  BackgroundThread monitor_;
};

}  // namespace lockstep::transport
