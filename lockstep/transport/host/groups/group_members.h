#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/transport/host/groups/channel_layout.h>
#include <lockstep/transport/host/groups/operation_outcome.h>
#include <lockstep/transport/host/host_transport.h>

namespace lockstep::transport {

/// Why a channel failed. what() says it in words, without the operation, which only the layer above knows.
class ChannelError : public std::runtime_error {
 public:
  ChannelError(FailureKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  FailureKind kind() const { return kind_; }

 private:
  FailureKind kind_;
};

/// How a group has failed, for its members on other hosts.
struct GroupFailure {
  FailureKind kind = FailureKind::kNone;
  int culprit = 0;        // a rank of the transport
  uint64_t sequence = 0;  // of the operation that has failed; 0: whichever is in progress
  std::string text;
};

/// The members of one group as one process sees them: their control blocks mapped, which of them are gone,
/// and what the group has decided. The group's channels stand on it. Ranks here are group ranks. Thread-safe.
class GroupMembers {
 public:
  /// Gives every member the others' words, in group order, each having put in its own.
  using AddressExchange = std::function<std::vector<uint64_t>(uint64_t own)>;

  /// Collective over `members` (transport ranks, in group order, this one among them). Throws what `exchange`
  /// throws.
  static std::shared_ptr<GroupMembers> open(std::shared_ptr<HostTransport> transport,
                                            std::vector<int> members, const AddressExchange& exchange,
                                            const Deadline& deadline);

  /// This rank's control block for a group whose members are not known yet, at most `most_members`. Once
  /// peers may use its word the memory stays: open() takes it, or give_back() does when they won't after all.
  class OwnBlock {
   public:
    OwnBlock(HostTransport& transport, int most_members);
    /// Its packed reference, for the peers.
    uint64_t word() const { return word_; }
    void give_back() { arena_->deallocate(memory_); }

   private:
    friend class GroupMembers;
    std::shared_ptr<Arena> arena_;
    std::byte* memory_;
    uint64_t word_;
  };
  /// The same with blocks that all know already: `words` in group order. Not collective. Throws
  /// c10::DistBackendError when a member ended and its memory had not arrived; the others are told then that
  /// this rank has left.
  static std::shared_ptr<GroupMembers> open(std::shared_ptr<HostTransport> transport,
                                            std::vector<int> members, const OwnBlock& own,
                                            const std::vector<uint64_t>& words, const Deadline& deadline);
  GroupMembers(const GroupMembers&) = delete;
  GroupMembers& operator=(const GroupMembers&) = delete;
  /// leave(), and gives the memory back once no member uses it any more.
  ~GroupMembers();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  /// Which of the transport's ranks it is.
  int transport_rank(int rank) const { return members_[rank]; }
  /// The rank within the job, for messages.
  int job_rank(int rank) const { return transport_->job_rank(members_[rank]); }
  HostTransport& transport() const { return *transport_; }
  const std::shared_ptr<HostTransport>& shared_transport() const { return transport_; }

  layout::ControlBlock& block(int rank) const { return *views_[rank].block; }
  /// See layout: announcements' payloads.
  std::byte* payloads(int rank) const { return views_[rank].payloads; }
  /// Where `from` puts the reference of its mailbox for `to`.
  std::atomic<uint64_t>& inbox(int to, int from) const { return views_[to].inbox[from]; }

  bool has_ended(int rank) const { return transport_->has_ended(members_[rank]); }
  bool has_left(int rank) const;
  bool is_gone(int rank) const { return has_left(rank) || has_ended(rank); }
  /// Says that this rank takes part in nothing further. May be called again.
  void leave();

  /// Wakes members [first, last) if they wait for a collective. Call publish_fence() before.
  void ring(int first, int last) const;
  /// Makes this rank's waiters look again. From any thread.
  void wake_waiters() const;
  /// Records that this rank waits for `peer`, until the word in the control block of `owner` is `value`.
  void record_wait(std::optional<RecordedWait>& record, int peer, int owner, const void* word,
                   uint64_t value) const {
    record_wait_for(record, members_[peer], owner, word, value);
  }
  /// The same, for any rank of the transport. `began_ns`: when the wait began, by the host's monotonic clock; 0: as the
  /// record says that is replaced, or else now.
  void record_wait_for(std::optional<RecordedWait>& record, int transport_rank, int owner, const void* word,
                       uint64_t value, int64_t began_ns = 0) const;

  // How operations end, see OperationOutcome.
  layout::OutcomeWords& outcome() const { return block(0).outcome; }
  Decision decision() const { return outcome::decision(outcome()); }
  /// Which member has aborted the group, and why: kAborted by itself, or what the member was told by fail_from_outside(). Its
  /// sequence: operations before that one may still succeed.
  std::optional<Decision> aborted() const;
  bool is_aborted(uint64_t sequence) const {
    const auto abort = aborted();
    return abort && abort->sequence <= sequence;
  }
  /// Why a group that has failed has; without a decision no rank has met the abort in an operation yet.
  Decision cause() const {
    const Decision decided = decision();
    return decided.is_failure() ? decided : *aborted();
  }
  /// Whether the operation fails, unless it has succeeded already.
  bool fails(uint64_t sequence) const { return decision().is_failure() || is_aborted(sequence); }
  /// Whether the group takes no further operations, now or soon: one was decided to have failed, or it was aborted.
  bool failed() const {
    return decision().is_failure() || outcome().abort.load(std::memory_order_acquire) != 0;
  }
  /// Decides that the operation has failed, unless there is a decision already. Only for an operation in
  /// which no rank can have succeeded, by a rank that has concluded the one before. `culprit`: a rank of the
  /// transport.
  void fail(FailureKind kind, int culprit, uint64_t sequence);
  /// Wakes all waiters of all members, for a failure or an abort.
  void tell_failure() const;
  /// Makes the operation in progress, or the next one, fail on all members, unless it has succeeded already.
  /// `reason`, if given, follows this rank's name in all members' errors.
  void abort(const std::string& reason = "");
  /// abort() because of what has happened on another host, of the operations from failure.sequence on. All members here
  /// say its text then. From any thread.
  void fail_from_outside(const GroupFailure& failure);
  /// The group's failure. `late`: members that had not come; `timeout`: what they were given. `to_others`: as other
  /// ranks say it.
  ChannelError describe_failure(const std::vector<int>& late, std::chrono::nanoseconds timeout,
                                bool to_others = false) const;

  /// "rank 2 (pid 4242)", in ranks of the job.
  std::string describe(const std::vector<int>& ranks) const;
  /// How an ended member ended.

  /// Runs `release` when no member can touch this group's memory any more (at the earliest when all have
  /// closed it).
  void release_after_close(std::function<void()> release);

 private:
  struct View {
    MemoryReference place;  // of the block, in its owner's arena
    layout::ControlBlock* block;
    std::atomic<uint8_t>* closed;  // by member
    std::atomic<uint64_t>* inbox;  // by member
    std::byte* payloads;
  };

  GroupMembers(std::shared_ptr<HostTransport> transport, std::vector<int> members);
  void map_blocks(const std::vector<uint64_t>& words, const Deadline& deadline);
  View view_of(std::byte* block) const;
  std::string describe_timeout(const Decision& decided, const std::vector<int>& late,
                               std::chrono::nanoseconds timeout, bool to_others) const;
  void abort_as(const Decision& cause);
  /// What a member was told by fail_from_outside(), or its reason for abort(), if that is why the group has failed; or null.
  const char* outside_text() const;

  std::shared_ptr<HostTransport> transport_;
  std::vector<int> members_;
  int rank_ = 0;
  std::byte* own_block_ = nullptr;
  std::vector<View> views_;
  std::mutex outside_mutex_;
  std::mutex releases_mutex_;
  std::vector<std::function<void()>> releases_;
};

}  // namespace lockstep::transport
