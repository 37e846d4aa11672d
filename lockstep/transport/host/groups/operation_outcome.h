#pragma once

#include <cstdint>

#include <lockstep/transport/host/groups/channel_layout.h>

namespace lockstep::transport {

enum class FailureKind : uint8_t {
  kNone = 0,
  kPeerEnded,
  kPeerLeft,
  kTimeout,
  kMismatch,
  kAborted,
  kLeftBehind,  // the others went on without this rank; see MembershipAgreement
};

/// The words of kMismatch; what each rank called may follow.
inline constexpr const char* kDifferentOperations = "the ranks called different operations";

/// How an operation of a group ended.
struct Decision {
  static constexpr uint64_t kSuccess = 7;
  uint64_t sequence;  // 0: no outcome yet
  uint64_t kind;      // FailureKind or kSuccess
  int culprit;        // the rank that is the cause; of an operation's outcome a rank of the transport
  int by;             // the member that gave up

  bool is_failure() const { return kind != 0 && kind != kSuccess; }
};

/// An outcome in one word, so that one compare-and-swap decides for all: 40 bits of sequence, 3 of kind, 12 of
/// the culprit, 9 of the member.
uint64_t pack_decision(const Decision& decision);
Decision unpack_decision(uint64_t word);

/// The functions of the group's words. Thread-safe, and safe between processes.
namespace outcome {
Decision decision(const layout::OutcomeWords& words);
/// Whether this operation was decided to have failed. Of an operation in doubt: a decision on a later one,
/// whatever it says, was made by a rank that had succeeded in this one.
bool has_failed(const layout::OutcomeWords& words, uint64_t sequence);
/// Whether `wanted` became the group's decision. A failure stays; success gives way to a later operation's.
bool decide(layout::OutcomeWords& words, const Decision& wanted);
}  // namespace outcome

/// How one operation ends for one rank: the protocol by which it succeeds on all members or on none.
///
/// An operation has succeeded when the flags of all members are set for which its last wait waits. A rank
/// that wants to give up before that first says so (proposal), then looks at the flags again: if they are set
/// after all, it goes on. A rank that has seen all flags looks whether any rank proposes to give up; only
/// then both meet at the compare-and-swap, and the first one decides. Fences after the proposal and after
/// the flags make sure that not both can miss the other: either the one sees the proposal, or the other sees
/// all flags.
///
/// operation_outcome_test.cc takes every order of the steps of two and three ranks. One thread.
class OperationOutcome {
 public:
  enum class Phase {
    kWaiting,     // for the members' flags
    kProposing,   // to give up
    kLooking,     // at the flags once more
    kDeciding,    // that it has failed
    kOverruled,   // another rank's decision came first
    kAllSeen,     // all flags of the last wait are set
    kConfirming,  // success, for a rank proposes to give up
    kContested,   // another rank's decision came first
    kSucceeded,
    kFailed,
  };

  /// `rank`: this member. `sequence`: of the operation, from 1.
  OperationOutcome(layout::OutcomeWords& words, int rank, uint64_t sequence)
      : words_(&words), rank_(rank), sequence_(sequence) {}

  Phase phase() const { return phase_; }
  /// From kWaiting, when the wait is to end with an error. `culprit`: a rank of the transport.
  void give_up(FailureKind kind, int culprit);
  /// From kWaiting, after the last wait.
  void see_all();
  /// Whether the next step belongs to the protocol; otherwise the caller waits, or it is over.
  bool is_stepping() const {
    return phase_ != Phase::kWaiting && phase_ != Phase::kSucceeded && phase_ != Phase::kFailed;
  }
  /// One access of shared memory. `complete()` looks whether what this rank waits for has come. True if this
  /// rank has decided that the operation has failed: the others, which wait, are to be woken.
  template <class Complete>
  bool step(Complete&& complete) {
    if (phase_ == Phase::kLooking) {
      phase_ = complete() ? Phase::kWaiting : Phase::kDeciding;
      return false;
    }
    return step_words();
  }

 private:
  bool step_words();

  layout::OutcomeWords* words_;
  int rank_;
  uint64_t sequence_;
  Phase phase_ = Phase::kWaiting;
  FailureKind kind_ = FailureKind::kNone;
  int culprit_ = 0;
};

}  // namespace lockstep::transport
