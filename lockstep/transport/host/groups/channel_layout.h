#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include <lockstep/transport/waiting.h>

/// What a rank keeps in its arena for one group, where all members read it. One cache line per flag, one
/// writer per flag, unless said otherwise. Part of the protocol between processes; only the channels of a
/// group and its MembershipAgreement touch it.
namespace lockstep::transport::layout {

/// Up to this many ranks each reads all announcements; larger groups combine them in a tree of this radix.
constexpr int kFlatRanks = 8;
/// Payload that fits into an announcement.
constexpr size_t kPayloadBytes = 8192;
/// Combined payload on its way up the tree: partial results may be twice as wide (float for bfloat16).
constexpr size_t kPartialBytes = 2 * kPayloadBytes;
/// So that a table with an entry for each rank fits into an announcement's payload (collectives' exchange()).
constexpr int kMaxRanks = 320;
/// What must agree on all ranks, in the words of the layer above; read only to explain a mismatch.
constexpr size_t kDetailBytes = 96;

/// A rank's announcement of one operation. Written before `sequence` is stored (release); read after it was
/// loaded (acquire).
struct alignas(64) AnnouncementSlot {
  std::atomic<uint64_t> sequence;
  uint64_t digest;         // equal on all ranks or the operation is refused
  uint64_t memory_offset;  // where the rank's data lie in its arena …
  uint32_t memory_segment;
  uint16_t has_memory;  // … if they do
  /// On which the rank ran then. Others may look while the next but one announcement is written: a hint.
  std::atomic<uint16_t> cpu;
  std::array<std::byte, kDetailBytes> details;
};
static_assert(sizeof(AnnouncementSlot) == 128);

/// What a leader (or, for all ranks, rank 0) found in the announcements below it.
struct alignas(64) Summary {
  std::atomic<uint64_t> sequence;
  uint32_t mismatch;
  uint32_t all_have_memory;
};

struct alignas(64) Flag {
  std::atomic<uint64_t> value;
};

/// All-or-none: see OperationOutcome. Group rank 0's is the group's; every member writes it.
struct alignas(64) OutcomeWords {
  std::atomic<uint64_t> proposal;  // highest sequence that a member thinks of giving up
  std::atomic<uint64_t> decision;  // packed Decision; 0: none yet
  std::atomic<uint64_t> abort;  // 1 + the packed Decision of the member that has aborted the group; 0: none
};

/// Where a rank waits for messages. Each rank that has changed something that this rank may wait for counts
/// an event; the waiter looks at everything again when the count has changed.
struct alignas(64) MessageEvents {
  Doorbell doorbell;
  alignas(64) std::atomic<uint64_t> count;

  void notify() {
    // Release, and as a read-modify-write also the fence that Doorbell asks for: a rank that sees the count
    // sees what was changed before.
    count.fetch_add(1, std::memory_order_seq_cst);
    publish_fence();
    doorbell.ring();
  }
};

/// A set of ranks in shared memory, 64 to a word.
using SharedRankSet = std::array<std::atomic<uint64_t>, kMaxRanks / 64>;

/// What a member says in one round of shrinking the group; see MembershipAgreement. `round` is stored last,
/// and is 0 while the rest changes, so a reader that finds the same round before and after its reading has
/// read that round's.
struct alignas(64) RecoveryRecord {
  std::atomic<uint64_t> round;
  std::array<std::atomic<uint64_t>, 2> addresses;  // packed references of control blocks for the new groups
  SharedRankSet wanted;                            // those that this rank would go on with
  SharedRankSet agreed;                            // what it tried to enter into the decision
};

/// How the living members of a group agree to go on without the others.
struct Recovery {
  Doorbell doorbell;                      // where the owner waits for the others
  Flag decision;                          // packed Decision on the last round; only group rank 0's counts
  Flag confirmed;                         // the round whose new group this rank has got
  std::array<RecoveryRecord, 2> records;  // by the round's last bit
};

/// Why the group has failed on another host, as this rank was told, or why this rank has aborted it. Written before the
/// outcome's `abort` names this rank; once.
struct alignas(64) OutsideFailure {
  static constexpr size_t kBytes = 512;
  std::array<char, kBytes> text;  // ends with 0; empty: this rank was told nothing
};

/// After each block follow, for each member, a word in which that member puts the reference of its mailbox
/// for this rank, and a byte in which it says that it has closed the group; then the payloads.
struct ControlBlock {
  Doorbell doorbell;
  Flag staged;   // chunks that this rank has put into its scratch, since the group began
  Flag reduced;  // chunks that it has read, or reduced, from others' scratch, since the group began
  Flag done;     // last operation whose work this rank has finished
  Flag joined;   // 1: this rank has mapped all members' blocks
  Flag left;     // 1: this rank has closed the group
  Flag scratch;  // packed reference of this rank's scratch, 0 until there is one
  Flag outside;  // waits of this rank for other hosts that are over
  OutcomeWords outcome;
  OutsideFailure outside_failure;
  MessageEvents messages;
  Recovery recovery;
  std::array<AnnouncementSlot, 2> slots;  // by the sequence's last bit
  std::array<Summary, 2> combined;        // leaders, groups beyond 8 ranks
  std::array<Summary, 2> result;          // rank 0, groups beyond 8 ranks
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace lockstep::transport::layout
