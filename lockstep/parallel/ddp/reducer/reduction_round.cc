#include <algorithm>
#include <iterator>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/parallel/ddp/reducer/reduction_round.h>

namespace lockstep {
namespace {

/// phases_test.py compares them with the drawing in docs/internals/reducer.md.
constexpr std::pair<RoundPhase, RoundPhase> kPhaseChanges[] = {
    {RoundPhase::kIdle, RoundPhase::kCounting},        // the first gradient
    {RoundPhase::kIdle, RoundPhase::kCollecting},      // the first gradient, or a shadow round
    {RoundPhase::kCounting, RoundPhase::kCollecting},  // the end of backward, or a shadow round
    {RoundPhase::kCollecting, RoundPhase::kLaunched},  // the last bucket is launched
    {RoundPhase::kCounting, RoundPhase::kIdle},        // given up
    {RoundPhase::kCollecting, RoundPhase::kIdle},      // given up, or a launch has failed
    {RoundPhase::kLaunched, RoundPhase::kIdle},        // finished, failed or given up
};

}  // namespace

void ReductionRound::enter(RoundPhase next) {
  const std::pair change(phase_, next);
  TORCH_INTERNAL_ASSERT(
      std::find(std::begin(kPhaseChanges), std::end(kPhaseChanges), change) != std::end(kPhaseChanges),
      "the reducer's round went from phase ", static_cast<int>(phase_), " to ", static_cast<int>(next));
  phase_ = next;
  if (next != RoundPhase::kIdle) return;
  arrivals_.clear();
  next_bucket_ = 0;
}

}  // namespace lockstep
