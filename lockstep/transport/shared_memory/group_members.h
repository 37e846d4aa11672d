#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/transport/shared_memory/channel_layout.h>
#include <lockstep/transport/shared_memory/host_transport.h>

namespace lockstep::transport {

enum class FailureKind : uint8_t {
  kNone = 0,
  kPeerEnded,
  kPeerLeft,
  kTimeout,
  kMismatch,
  kAborted,
  kLeftBehind,  // the others went on without this rank; see RecoveryBoard
};

/// Why a channel failed. what() says it in words, without the operation, which only the layer above knows.
class ChannelError : public std::runtime_error {
 public:
  ChannelError(FailureKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  FailureKind kind() const { return kind_; }

 private:
  FailureKind kind_;
};

/// A group's verdict on one operation.
struct Decision {
  static constexpr uint64_t kSuccess = 15;
  uint64_t sequence;  // 0: no verdict yet
  uint64_t kind;      // FailureKind or kSuccess
  int culprit;        // the rank that failed
  int by;             // the rank that gave up

  bool is_failure() const { return kind != 0 && kind != kSuccess; }
};

/// A verdict in one word, so that one compare-and-swap decides for all: 40 bits of sequence, 4 of kind, 10 of
/// each rank.
uint64_t pack_decision(const Decision& decision);
Decision unpack_decision(uint64_t word);

/// A piece of arena memory as one word that fits into a flag or a store; 0 means none.
uint64_t pack_reference(const MemoryReference& reference);
MemoryReference unpack_reference(uint64_t word);

/// The members of one group as one process sees them: their control blocks mapped, who is gone, and what the
/// group has decided. The group's channels stand on it. Ranks here are group ranks. Thread-safe.
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

  // The verdict: all or none, see GroupChannel::commit.
  Decision decision() const;
  bool failed() const { return decision().is_failure(); }
  void propose_to_give_up(uint64_t sequence);
  bool is_proposed(uint64_t sequence) const;
  /// Whether this call's failure (kNone: success) became the group's decision on the operation.
  bool decide(FailureKind kind, int culprit, uint64_t sequence);
  /// The decided failure. `late`: members that had not come; `timeout`: what they were given.
  ChannelError describe_failure(const std::vector<int>& late, std::chrono::nanoseconds timeout) const;

  /// "rank 2 (pid 4242)", in ranks of the job.
  std::string describe(const std::vector<int>& ranks) const;
  /// How an ended member ended.
  std::string describe_end(int rank) const { return transport_->describe_end(members_[rank]); }

  /// Runs `release` when no member can touch this group's memory any more (at the earliest when all have
  /// closed it).
  void release_after_close(std::function<void()> release);

 private:
  struct View {
    layout::ControlBlock* block;
    std::atomic<uint8_t>* closed;  // by member
    std::atomic<uint64_t>* inbox;  // by member
    std::byte* payloads;
  };

  GroupMembers(std::shared_ptr<HostTransport> transport, std::vector<int> members);
  void map_blocks(const std::vector<uint64_t>& words, const Deadline& deadline);
  View view_of(std::byte* block) const;

  std::shared_ptr<HostTransport> transport_;
  std::vector<int> members_;
  int rank_ = 0;
  std::byte* own_block_ = nullptr;
  std::vector<View> views_;
  std::mutex releases_mutex_;
  std::vector<std::function<void()>> releases_;
};

}  // namespace lockstep::transport
