#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/transport/host/groups/group_members.h>
#include <lockstep/transport/host/groups/message_channel.h>

namespace lockstep::transport {

/// What a rank tells the others before an operation begins.
struct Announcement {
  uint64_t digest = 0;  // of everything that must agree
  std::array<std::byte, layout::kDetailBytes> details{};
  std::optional<MemoryReference> memory;  // the data, if they lie in this rank's arena
  const void* payload = nullptr;          // the data themselves, at most HostChannel::kPayloadBytes
  size_t payload_bytes = 0;
};

/// Combines payloads on their way up the tree (groups beyond 8 ranks).
class PayloadCombiner {
 public:
  virtual ~PayloadCombiner() = default;
  /// `inputs` in rank order, to at most 2·kPayloadBytes at `partial`.
  virtual void combine(void* partial, const std::vector<const void*>& inputs) const = 0;
  /// Partial results in rank order, to at most kPayloadBytes at `result`.
  virtual void finish(void* result, const std::vector<const void*>& partials) const = 0;
};

/// What a rank waits for from ranks of other hosts, for HostChannel::await_outside().
class OutsideWait {
 public:
  struct Gone {
    FailureKind kind;
    int culprit;  // a rank of the transport
  };

  virtual ~OutsideWait() = default;
  /// Whether all has come; moves what can be moved now.
  virtual bool complete() = 0;
  /// One that has ended or left of the ranks from which something has not come.
  virtual std::optional<Gone> gone() = 0;
  /// Whether gone() may have changed since it was called last. Reads atomics only.
  virtual bool has_changed() const = 0;
  /// The ranks from which something has not come, of the transport.
  virtual std::vector<int> late() const = 0;
  /// Runs before each sleep. What comes must ring HostChannel::doorbell() from then on.
  virtual void before_sleep() = 0;
};

/// One process group's share of the host transport: announcements, flags, scratch.
/// docs/internals/shared_memory_protocol.md has the protocol and its proof.
///
/// An operation is begin() → announce() → await_announcements() → [publish() and await() of flags] →
/// commit(). All members run the same operations in the same order, each from one thread at a time; abort()
/// and failed() may be called from any thread. Every wait ends: by what is waited for, the deadline, the end
/// of a peer, or another member's failure; it then throws ChannelError, on all members, and the channel stays
/// failed.
///
/// Ranks here are group ranks, 0 to size()−1.
class HostChannel {
 public:
  static constexpr size_t kPayloadBytes = layout::kPayloadBytes;
  /// Up to this size each rank reads all announcements; larger groups combine them in a tree of this radix.
  static constexpr int kFlatRanks = layout::kFlatRanks;
  enum class Flag { kStaged, kReduced, kDone };

  /// Collective over members that know each other already. Throws ChannelError.
  static std::shared_ptr<HostChannel> open(std::shared_ptr<GroupMembers> members, const Deadline& deadline);
  /// A second channel of the members of another one, which joins for both: all must have made this one before
  /// they open that one. Waits for no rank.
  static std::shared_ptr<HostChannel> open_beside(std::shared_ptr<GroupMembers> members);
  /// The first wait of a group whose channel was made by open_beside() but joins by itself. Throws ChannelError.
  void join(const Deadline& deadline);
  HostChannel(const HostChannel&) = delete;
  HostChannel& operator=(const HostChannel&) = delete;
  ~HostChannel();

  int rank() const { return rank_; }
  int size() const { return members_->size(); }
  /// The rank within the job, for messages.
  int job_rank(int rank) const { return members_->job_rank(rank); }
  HostTransport& transport() const { return members_->transport(); }
  const GroupMembers& members() const { return *members_; }
  const std::shared_ptr<GroupMembers>& shared_members() const { return members_; }
  uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }
  /// Send and receive between members.
  MessageChannel& messages() { return messages_; }

  /// Starts the next operation. `background`: the caller is a communication thread beside a computing one.
  void begin(const Deadline& deadline, bool background);
  /// So many bytes of the operation in progress travel between hosts. If that takes long its waiters sleep at once.
  void expect_messages(size_t bytes);
  /// Where the payload of the coming announcement is to stand, kPayloadBytes: for a caller that writes it
  /// there itself.
  std::byte* own_payload();
  void announce(const Announcement& announcement);
  /// Returns once every member has announced this operation; throws kMismatch if the digests differ, before
  /// any member's data were touched, with what `explain`, if any, makes of the announcements. With a combiner,
  /// groups beyond kFlatRanks have the combined payload ready after it.
  void await_announcements(const PayloadCombiner* combiner = nullptr,
                           const std::function<std::string()>& explain = {});

  // After await_announcements():
  bool all_have_memory() const { return all_have_memory_; }
  const void* payload(int rank) const;
  /// The combined payload (groups beyond kFlatRanks that were given a combiner).
  const void* combined_payload() const;
  /// The announced memory of a member, as mapped here.
  std::byte* memory(int rank);
  /// Other memory in a member's arena, as mapped here.
  std::byte* memory(int rank, const MemoryReference& reference);
  const std::array<std::byte, layout::kDetailBytes>& details(int rank) const;

  /// Fails the operation on all members because of what they have announced, before any data were touched:
  /// all must come to the same conclusion, with `text` for each.
  [[noreturn]] void refuse(const std::string& text);

  /// Sets this rank's flag (values only grow) after everything written so far, and wakes the ranks that wait.
  void publish(Flag flag, uint64_t value);
  /// Waits until all members' flag, or one member's, is at least `value`; what they wrote before is then
  /// visible.
  void await_all(Flag flag, uint64_t value);
  void await_rank(Flag flag, int rank, uint64_t value);
  /// await_rank() of what that rank publishes when it has heard from other hosts. It pauses less and yields more, because a
  /// rank that drives the wire may need this core.
  void await_relay(Flag flag, int rank, uint64_t value);

  /// The same for what comes from other hosts. It ends as the other waits do, also by the end of a rank there.
  void await_outside(OutsideWait& wait);
  /// Ends the sleep of this rank's waits, which then look again.
  Doorbell& doorbell() const { return block(rank_).doorbell; }

  /// The last step of each operation, after its last await: makes success final for all, or throws if the
  /// others have decided otherwise. Nothing may be waited for after it.
  void commit();

  /// What interrupted a wait (base/process/interrupt.h) that turned out to be over, so that the operation has
  /// succeeded all the same; once. Null if nothing did. An interruption of a wait that is not over is thrown
  /// by the wait.
  std::exception_ptr take_interruption() { return std::exchange(interruption_, nullptr); }

  /// This rank's scratch, at least `bytes`; grows at need, visible to others after the next publish().
  std::byte* scratch(size_t bytes);
  std::byte* scratch_of(int rank);
  /// Chunks staged before this operation by every member; the operation adds its own count to it when it is
  /// done.
  uint64_t chunk_base() const { return chunk_base_; }
  void add_chunks(uint64_t count) { chunk_base_ += count; }

  /// Says that this rank takes part in no further operation: members that wait for it fail at once. Not while
  /// an operation is in progress. May be called again.
  void leave() { members_->leave(); }

  /// Fails the group on all members: the operation in progress, unless it has succeeded already, or else the
  /// next one. Waits in progress end. From any thread.
  void abort(const std::string& reason = "") { members_->abort(reason); }
  /// The same because of what has happened on another host: all members here throw its kind with its text, in the
  /// operation that has failed there or a later one.
  void fail_from_outside(const GroupFailure& failure) { members_->fail_from_outside(failure); }
  /// For a group over hosts: a member on another one that has ended, as a rank of the transport. Before all of this host have
  /// announced an operation no host can have completed it, so it fails then, whichever rank this one waits for.
  void set_ended_outside(std::function<std::optional<int>()> ended_outside) {
    ended_outside_ = std::move(ended_outside);
  }
  /// A member on another host takes part in none from the operation `first` on: those fail with its loss, also where all that
  /// this rank waits for is on its own host. `rank`: of the transport. From any thread.
  void note_absence(int rank, uint64_t first);
  /// Whether the next operation fails, if not that in progress.
  bool failed() const { return members_->fails(sequence() + 1); }
  /// The operation that abort() fails, if it was called now.
  uint64_t next_to_fail() const { return concluded() ? sequence() + 1 : sequence(); }
  /// The failure of a channel that has failed. From any thread.
  GroupFailure failure_for_others(const std::vector<int>& late = {}) const;
  /// `on_failure` runs once, in the operation's thread, before it throws that the channel has failed.
  void set_on_failure(std::function<void(const GroupFailure&)> on_failure) {
    on_failure_ = std::move(on_failure);
  }
  /// Runs `release` when no member can touch this group's memory any more (at the earliest when all have
  /// closed it).
  void release_after_close(std::function<void()> release) {
    members_->release_after_close(std::move(release));
  }

 private:
  /// How far this rank is with its operations. The thread that runs them changes it; others may read it.
  enum class Phase : uint8_t {
    kJoining,     ///< the members meet, before the first operation
    kConcluded,   ///< the last operation has succeeded here, or was decided to have failed
    kAnnouncing,  ///< this rank waits for the others' announcements
    /// The rest of an operation. Also after this rank has left it by an error of its own: its flags may have let
    /// others succeed.
    kUnderWay,
  };

  explicit HostChannel(std::shared_ptr<GroupMembers> members);

  layout::ControlBlock& block(int rank) const { return members_->block(rank); }
  layout::AnnouncementSlot& slot(int rank) const { return block(rank).slots[sequence() & 1]; }
  std::byte* partial_payload(int rank) const;
  std::byte* result_payload() const;
  layout::Flag& flag_of(Flag flag, int rank) const;

  template <class Word>
  class RankWait;
  /// Both: whether all have announced the same.
  bool await_flat();
  bool await_tree(const PayloadCombiner* combiner);
  WaitPolicy policy_for(int rank) const;
  void await_flag(Flag flag, int rank, uint64_t value, std::optional<WaitPolicy> policy);
  /// `policy`: none for policy_for() the rank that is waited for.
  template <class Word>
  void await_ranks(int first, int last, int step, uint64_t value, Word&& word,
                   std::optional<WaitPolicy> policy = {});
  template <class Wait>
  void await(Wait& wait);
  bool give_up(FailureKind kind, int culprit, const std::function<bool()>& complete);
  [[noreturn]] void fail_as_decided(const std::vector<int>& late);
  std::vector<int> not_announced() const;
  std::optional<OutsideWait::Gone> gone_outside() const;
  std::optional<int> ended_member();  // as a rank of the transport
  Phase phase() const { return phase_.load(std::memory_order_relaxed); }
  void enter(Phase next) { phase_.store(next, std::memory_order_relaxed); }
  bool concluded() const { return phase() == Phase::kConcluded || phase() == Phase::kJoining; }
  bool lacks_a_member() const { return first_absence_.load(std::memory_order_acquire) <= sequence(); }

  std::shared_ptr<GroupMembers> members_;
  const int rank_;
  MessageChannel messages_;

  // The operation in progress; one thread at a time.
  std::atomic<uint64_t> sequence_{0};
  Deadline deadline_ = Deadline::never();
  std::chrono::nanoseconds timeout_{};
  WaitPolicy policy_;          // of the operation in progress: for its neighbours,
  WaitPolicy outside_policy_;  // and for other hosts
  WaitPolicy foreground_policy_;
  WaitPolicy background_policy_;
  bool spin_apart_ = false;  // there is a core for each rank
  bool all_have_memory_ = false;
  std::atomic<Phase> phase_{Phase::kConcluded};
  std::atomic<uint64_t> first_absence_{UINT64_MAX};  // see note_absence()
  std::atomic<int> absent_rank_{-1};
  std::function<std::optional<int>()> ended_outside_;
  uint32_t endings_of_others_ =
      0;  // HostTransport::endings() when the members were looked at last, and none had ended
  std::exception_ptr interruption_;

  std::byte* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
  uint64_t chunk_base_ = 0;
  std::optional<ChannelError> failure_;
  std::function<void(const GroupFailure&)> on_failure_;
};

}  // namespace lockstep::transport
