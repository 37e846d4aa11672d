#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/rendezvous/exit_status_table.h>
#include <lockstep/transport/group_layout.h>
#include <lockstep/transport/host/control_channel.h>
#include <lockstep/transport/host/memory/arena.h>
#include <lockstep/transport/host/peer_links.h>
#include <lockstep/transport/host/peer_liveness.h>
#include <lockstep/transport/host/stragglers.h>
#include <lockstep/transport/host/wait_record.h>
#include <lockstep/transport/wire/wire.h>

namespace c10d {
class Store;
}

namespace lockstep::transport {

class GroupMembers;
struct EndOfFarRank;

/// The ranks of a job as one process sees them: of those on this host all memory mapped and all processes
/// watched; of those on other hosts the connection.
///
/// One per process and job (world); the groups' channels stand on it. It holds this rank's arena, a mapping of every
/// neighbour's segments, the wire to the other hosts if there are any, and one monitor thread, which maps further
/// segments as they arrive, receives the control messages of other hosts, and notices when a peer ends. Knows nothing of
/// operations. Thread-safe. Lifetime: channels and arena memory keep what they need alive; when the last goes, the peers
/// are told that this rank left in good order.
class HostTransport : public std::enable_shared_from_this<HostTransport> {
 public:
  struct Options {
    size_t segment_bytes = size_t{64} << 20;  // arena growth step; pages cost nothing until touched
    std::vector<int> job_ranks = {};  // what messages call the ranks; empty: 0, 1, … as everywhere else
    std::string met_at = {};          // an all-gather to which all ranks have come: see store_all_gather()
    // For jobs over several hosts:
    std::vector<int> host_of = {};             // by rank: a host's number; empty: all are on this one
    std::vector<std::string> host_names = {};  // by number, for messages
    std::function<std::unique_ptr<wire::Engine>(int rank)> make_engine = {};  // of this rank's wire
    std::chrono::nanoseconds heartbeat_timeout = std::chrono::seconds(10);    // see PeerLiveness: the limit
    // See find_straggler(); in the log of the first rank. And the launcher is told for whom this rank has waited for as
    // long as the timeout of heartbeats.
    bool names_stragglers = true;
  };

  /// Joins the other processes of the job through the store. Collective; throws as connect_peers() does. Over hosts, each
  /// two of them have then passed messages both ways.
  static std::shared_ptr<HostTransport> connect(c10d::Store& store, int rank, int world_size,
                                                const Deadline& deadline, const Options& options);
  /// Ranks as threads of this process over one mapping, so that ThreadSanitizer sees the protocol. No process is
  /// watched.
  static std::vector<std::shared_ptr<HostTransport>> connect_threads(int world_size, const Options& options);

  ~HostTransport();

  int rank() const { return rank_; }
  /// What messages call a rank: where this transport's ranks are only some of the job's.
  int job_rank(int rank) const { return job_ranks_.empty() ? rank : job_ranks_[rank]; }
  int world_size() const { return static_cast<int>(peers_.size()); }
  /// How many ranks there still are on this host, this one among them.
  int living_count() const {
    return static_cast<int>(layout_.neighbours().size()) -
           static_cast<int>(neighbours_ended_.load(std::memory_order_relaxed));
  }
  /// The layout of all ranks of the job.
  const GroupLayout& layout() const { return layout_; }
  bool spans_hosts() const { return layout_.spans_hosts(); }
  bool is_here(int rank) const { return layout_.host_of[rank] == layout_.host(); }
  /// The host of a rank of a job over several hosts; else "".
  const std::string& host_name(int rank) const { return peers_[rank]->host; }
  /// " on node-a", of a rank of a job over several hosts; else "".
  std::string on_host(int rank) const;
  /// Says that the program calls ranks by other numbers than the job did at its start: messages, which keep
  /// to the job's, say so from now on.
  void set_renumbered() { renumbered_.store(true, std::memory_order_relaxed); }
  /// " of the job" then, else "": what follows "rank 2" in messages.
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
  /// "rank 2 (pid 4242) was killed by signal 9 (SIGKILL)". Takes up to 50 ms for a peer that has just ended. Of one on
  /// another host its neighbours' message is awaited for 300 ms; then those that live are asked, for up to 3 s in all.
  std::string describe_end(int rank);
  /// " in 2B3": what a rank of this host does of a plan, or did when it ended, and of another host's in what it was stopped, as was
  /// heard from there last; "" where that is not known, or it has none.
  std::string in_action(int rank) const;
  /// What a rank of this host does of a plan, as a word of TellingAction; of a rank of another host, hear_action(). 0: it does
  /// nothing of one, or nothing is known.
  uint64_t action_of(int rank) const;
  /// A rank of another host was in that action, or is past it, by what has come from it or what others say; 0 tells nothing.
  /// From any thread.
  void hear_action(int rank, uint64_t action);
  /// From now on what was heard does not count: this rank has done its part of the plan.
  void forget_actions();
  /// " in or after 2B3": as hear_action() of a rank of another host says; else "".
  std::string in_or_after_action(int rank) const;
  /// Whether the own host of a rank that has ended, or the rank itself, has said so. Otherwise its connection is lost, and
  /// it may live and be cut off.
  bool end_is_certain(int rank) const;
  int pid_of(int rank) const { return peers_[rank]->link.pid; }
  /// "rank 2 (pid 4242)"; in a job over several hosts "rank 2 (pid 4242 on node-a)".
  std::string describe(int rank) const;
  /// "ranks 2 and 3 (pid 4242, 4243)"
  std::string describe(const std::vector<int>& ranks) const;
  /// Whether the rank's process is stopped by a signal or a debugger, as far as this host's /proc says; of a rank on
  /// another host, as was heard from there last.
  bool is_stopped(int rank) const;
  /// The state of a rank on another host.
  PeerState state_of(int rank) const;
  /// "has been silent for 7 s", of a rank on another host that is suspected; else "".
  std::string describe_silence(int rank) const;
  /// The rank that keeps `ranks`, at least one, from going on: one that has ended or is stopped, if it is
  /// among them or they wait for such a one by way of others, in whatever groups; else one that waits for no
  /// rank; else the first of them. A guess when several threads of a rank wait at once, or ranks move
  /// meanwhile. Ranks on other hosts are asked: takes up to 2 s for one that does not answer.
  int cause_of_waiting(const std::vector<int>& ranks);
  /// One that is stopped, of `ranks` or of those that keep them waiting; −1 if none is known. Asks ranks on other hosts in
  /// turn, for 2 s in all, and until the one that is asked then has answered, for 2 s at most.
  int find_stopped(const std::vector<int>& ranks);
  /// Whether `finder`, this rank or another one of its host, has just found that one to be stopped, and so to be what kept it
  /// waiting. Holds though those who have said so of a rank on another host have ended meanwhile.
  bool has_found_stopped(int finder, int rank) const;
  WaitRecords& wait_records() const;
  /// Tells the launcher that this rank made an operation fail, for its report.
  void note_culprit(int rank) const;
  /// Tells the other hosts, once, how a rank of this one has ended; of a rank elsewhere it tells nothing. An operation that
  /// fails by that end calls it before it fails: what this rank tells then may end ranks that would have heard it only
  /// later, and whose neighbours depend on it.
  void tell_end_of(int rank);

  // To ranks on other hosts. Only in a job over several hosts:
  wire::Wire& wire() const { return *wire_; }
  /// Says that this rank sends to another or receives from it, so that each hears how the other ends.
  void meet(int rank) { peers_[rank]->met.store(true, std::memory_order_relaxed); }
  /// Says that this rank waits for others by other means than messages, the store say. Of those on other hosts silence
  /// is noticed then as if messages were pending. To be called again and again while the wait lasts: before the answer.
  Deadline expect(const std::vector<int>& ranks);
  /// Sends it without waiting. From any thread.
  void tell(int rank, const ControlMessage& message);
  /// Once this returns, what others had told this rank before what it has received from them counts.
  void await_heard() { control_->await_heard(); }
  /// Gives the listener a number, which no other group of this rank has, for messages' `group` and the tags of data that
  /// come to this rank: the wire's channels [number, number + kChannelsPerGroup). Throws c10::DistBackendError when all
  /// have been given.
  static constexpr uint32_t kChannelsPerGroup = ControlChannel::kChannelsPerGroup;
  uint32_t add_listener(ControlListener& listener) { return control_->add_listener(listener); }
  /// The listener is called no more when this returns. `failure_message` stays for those that come later, if the group
  /// has failed.
  void remove_listener(uint32_t number, const std::optional<ControlMessage>& failure_message) {
    control_->remove_listener(number, failure_message);
  }

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
    std::once_flag end_told;           // of a rank on this host, to the others
    std::atomic<bool> goes_on{false};  // its process, long after it has closed its connections
    std::string host;                  // its name; empty in a job on one host
    std::string wire;                  // of a rank on another host: what its wire says of itself
    // How long describe_end() waits to hear of it, from the first call on; under segments_mutex_.
    Deadline least_patience_for_end = Deadline::never();
    Deadline patience_for_end = Deadline::never();
    Deadline question_for_end = Deadline::never();  // when its host is asked (again)
    std::string end;  // how a rank on another host has ended, if that is known; under segments_mutex_
    bool end_is_certain = false;  // its host, or the rank itself, has said so; under segments_mutex_
    std::string own_fault;        // of this process, by which the connection was lost; under segments_mutex_
    // What a rank on another host has said of what it waits for; under segments_mutex_:
    bool asked = false;  // and has not answered yet
    Deadline patience = Deadline::never();
    uint32_t answers = 0;
    uint32_t host_answers = 0;  // of others of its host: how it is
    int cause = -1;
    std::string stopped_in;            // see in_action(), as its host or a rank that knows of it has said
    std::atomic<uint64_t> action{0};   // see hear_action()
    std::atomic<bool> met{false};      // has messages with this rank
    std::optional<PeerLiveness> life;  // of a rank on another host; under segments_mutex_
    Deadline expected = Deadline::after(std::chrono::nanoseconds(0));  // see expect(); under segments_mutex_
    std::optional<uint32_t> activity;  // wire::Wire::activity() at the last look; monitor thread only
    std::optional<PhaseTimes> phases;  // of a rank on another host, as its host says; under segments_mutex_
    bool witness = false;              // is asked how another of its host is; monitor thread only
    // Base addresses of the peer's segments; null until mapped. Written by the monitor thread (release), read
    // by all.
    std::array<std::atomic<std::byte*>, Arena::kMaxSegments> bases{};
    std::array<size_t, Arena::kMaxSegments> sizes{};  // in bytes; written before the base
    std::vector<std::shared_ptr<Segment>> segments;   // keeps the mappings; monitor thread only
    std::map<uint32_t, std::string>
        unmapped;  // segments that could not be mapped, and why; under segments_mutex_
  };
  struct Unsent {
    int rank;  // of the peer
    uint32_t index;
    std::shared_ptr<Segment> segment;
  };
  struct Retired {
    std::function<bool()> unused;
    std::function<void()> release;
  };

  HostTransport(int rank, int world_size, const Options& options);
  void install(int rank, uint32_t index, std::shared_ptr<Segment> segment);
  /// The address of a word; null unless it lies in a segment that is mapped.
  std::byte* mapped_address(int rank, const MemoryReference& reference) const;
  void publish_segment(uint32_t index, const std::shared_ptr<Segment>& segment);
  /// Whether some still can't be sent.
  bool send_unsent();
  void start_monitor(bool watches);
  void make_wire(const Options& options);
  void hear(int from, const ControlMessage& message);
  int find_cause(const std::vector<int>& ranks);
  int cause_known_here(const std::vector<int>& ranks) const;
  std::vector<int> awaited_by(int rank) const;
  std::optional<int> given_up_by(int rank) const;
  std::optional<int> ask_for_cause(int rank);
  void tell_cause(int rank);
  void hear_cause(int from, const ControlMessage& message);
  ControlMessage end_message(int neighbour);
  void look_at_far_ranks();
  std::vector<int> witnesses_of(int rank) const;
  void ask_host_of(int rank);
  void tell_state_of(int neighbour, int to);
  void hear_state(const ControlMessage& message);
  void begin_telling_phases(bool names_stragglers);
  bool is_over(const WaitRecord& record) const;
  void look_at_own_waits();
  bool speaks_for_host(const std::vector<RankPhases>& training);
  void on_window();
  void hear_phases(int rank, const std::string& text);
  void give_up(int rank);
  void hear_loss(int rank, const std::string& reason);
  void lose_by_own_fault(int rank);
  void say_goodbye();
  void hear_end(int rank, const std::string& end, bool certain);
  const EndOfFarRank* end_of_far_rank(int rank) const;
  std::chrono::nanoseconds patience_with_neighbours_of(int rank) const;
  /// Whether the rank's host has no other.
  bool is_alone(int rank) const;
  std::string describe_loss(int rank, const std::string& reason) const;
  void monitor(bool watches);
  bool awaits_end_of(int rank);
  void note_unmapped(int rank, uint32_t index, const std::string& reason);
  void mark_ended(int rank);
  void sweep_retired();

  const int rank_;
  const std::vector<int> job_ranks_;
  const GroupLayout layout_;
  const std::chrono::nanoseconds heartbeat_timeout_;
  ForkGuard fork_guard_;
  std::shared_ptr<Arena> arena_;
  std::vector<std::unique_ptr<Peer>> peers_;    // by rank, the own one too
  std::vector<HostTransport*> fellow_threads_;  // connect_threads only
  std::atomic<uint32_t> endings_{0};
  std::atomic<uint32_t> neighbours_ended_{0};
  std::atomic<bool> renumbered_{false};

  std::shared_ptr<const PhaseAudience> audience_;  // of a process's phases: not of threads that play ranks
  StragglerWatch stragglers_;                      // of the thread that trains
  int windows_as_first_ = 0;                       // in a row; of the same thread
  std::optional<ExitStatusTable> launcher_;        // that is told of long waits; monitor thread only
  bool has_told_wait_ = false;                     // monitor thread only

  mutable std::mutex segments_mutex_;
  mutable std::condition_variable segments_changed_;
  std::vector<Unsent> unsent_;  // own segments that could not be sent yet; under segments_mutex_

  std::mutex groups_mutex_;
  std::unordered_set<GroupMembers*> groups_;

  std::mutex retired_mutex_;
  std::vector<Retired> retired_;

  UniqueFd wake_event_;  // of the monitor thread
  std::atomic<bool> stopping_{false};
  // Neighbours that have closed their sockets, and until when they may take to end; monitor thread only.
  std::map<int, Deadline> closing_;
  std::map<int, Deadline>
      reported_;  // ranks that have ended, as they or others say: when the wire abandons them; monitor thread only
  std::unique_ptr<ControlChannel> control_;  // null on one host, as the wire
  std::unique_ptr<wire::Wire> wire_;         // goes first
  BackgroundThread monitor_;
};

}  // namespace lockstep::transport
