#include <c10/util/Exception.h>

#include <lockstep/transport/host/groups/operation_outcome.h>
#include <lockstep/transport/wire/engine.h>

namespace lockstep::transport {

static_assert(layout::kMaxRanks <= 1 << 9 && wire::Engine::kMaxRanks <= 1 << 12);

uint64_t pack_decision(const Decision& decision) {
  return decision.sequence << 24 | decision.kind << 21 | static_cast<uint64_t>(decision.culprit) << 9 |
         static_cast<uint64_t>(decision.by);
}
Decision unpack_decision(uint64_t word) {
  return {word >> 24, word >> 21 & 0x7, static_cast<int>(word >> 9 & 0xfff), static_cast<int>(word & 0x1ff)};
}

Decision outcome::decision(const layout::OutcomeWords& words) {
  return unpack_decision(words.decision.load(std::memory_order_acquire));
}

bool outcome::has_failed(const layout::OutcomeWords& words, uint64_t sequence) {
  const Decision decided = decision(words);
  return decided.is_failure() && decided.sequence <= sequence;
}

bool outcome::decide(layout::OutcomeWords& words, const Decision& wanted) {
  uint64_t current = words.decision.load(std::memory_order_acquire);
  do {
    const Decision decided = unpack_decision(current);
    if (decided.is_failure() || decided.sequence >= wanted.sequence) return false;
  } while (!words.decision.compare_exchange_weak(current, pack_decision(wanted), std::memory_order_acq_rel));
  return true;
}

void OperationOutcome::give_up(FailureKind kind, int culprit) {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::kWaiting);
  kind_ = kind;
  culprit_ = culprit;
  phase_ = Phase::kProposing;
}

void OperationOutcome::see_all() {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::kWaiting);
  phase_ = Phase::kAllSeen;
}

bool OperationOutcome::step_words() {
  switch (phase_) {
    case Phase::kProposing: {
      uint64_t proposed = words_->proposal.load(std::memory_order_relaxed);
      while (proposed < sequence_ &&
             !words_->proposal.compare_exchange_weak(proposed, sequence_, std::memory_order_seq_cst)) {
      }
      publish_fence();
      phase_ = Phase::kLooking;
      return false;
    }
    case Phase::kDeciding: {
      const bool first = outcome::decide(*words_, {sequence_, static_cast<uint64_t>(kind_), culprit_, rank_});
      phase_ = first ? Phase::kFailed : Phase::kOverruled;
      return first;
    }
    case Phase::kOverruled:
      phase_ = outcome::has_failed(*words_, sequence_) ? Phase::kFailed : Phase::kWaiting;
      return false;
    case Phase::kAllSeen:
      publish_fence();
      phase_ = words_->proposal.load(std::memory_order_acquire) >= sequence_ ? Phase::kConfirming
                                                                             : Phase::kSucceeded;
      return false;
    case Phase::kConfirming: {
      const bool first = outcome::decide(*words_, {sequence_, Decision::kSuccess, 0, rank_});
      phase_ = first ? Phase::kSucceeded : Phase::kContested;
      return false;  // no rank waits for that
    }
    case Phase::kContested:
      phase_ = outcome::has_failed(*words_, sequence_) ? Phase::kFailed : Phase::kSucceeded;
      return false;
    case Phase::kLooking:  // in step()
    case Phase::kWaiting:
    case Phase::kSucceeded:
    case Phase::kFailed:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "the operation's outcome needs no step");
}

}  // namespace lockstep::transport
