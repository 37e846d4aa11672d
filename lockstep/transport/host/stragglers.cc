#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <utility>

#include <lockstep/base/text/formatted.h>
#include <lockstep/base/training/where_lead_lies.h>
#include <lockstep/base/upper_median.h>
#include <lockstep/transport/host/stragglers.h>

namespace lockstep::transport {
namespace {

constexpr double kLeastShare = 0.2;    // of a step, that the others lose
constexpr double kLeastWaiting = 0.5;  // of that, that they wait longer
constexpr double kSameStep = 0.1;      // by which steps of ranks that train together differ at most

/// Of an even number the upper one, so that what is above it is above most.
double upper_median_of(const std::vector<RankPhases>& ranks,
                       const std::function<double(const PhaseTimes&)>& get) {
  std::vector<double> values;
  for (const RankPhases& each : ranks) values.push_back(get(each.times));
  return upper_median(std::move(values));
}

/// Those that train together with it.
std::vector<RankPhases> others_of(const RankPhases& each, const std::vector<RankPhases>& ranks) {
  std::vector<RankPhases> others;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(others), [&](const RankPhases& other) {
    return other.rank != each.rank &&
           std::abs(other.times.step - each.times.step) <= kSameStep * each.times.step;
  });
  return others;
}

std::string format_ms(double ns) {
  const double ms = ns / 1e6;
  return formatted(ms < 10 ? "%.2f ms" : ms < 100 ? "%.1f ms" : "%.0f ms", ms);
}

}  // namespace

std::optional<Straggler> find_straggler(const std::vector<RankPhases>& ranks) {
  std::optional<Straggler> slowest;
  for (const RankPhases& each : ranks) {
    const PhaseTimes& times = each.times;
    const std::vector<RankPhases> others = others_of(each, ranks);
    if (others.empty()) continue;
    const double own = upper_median_of(others, [](const PhaseTimes& other) { return other.own; });
    const double lead = times.own - own;
    const double waiting =
        -upper_median_of(others, [](const PhaseTimes& other) { return -other.of(TrainingPhase::kWaiting); });
    const bool awaited = waiting - times.of(TrainingPhase::kWaiting) >= kLeastWaiting * lead;
    if (lead <= kLeastShare * times.step || !awaited || (slowest && times.own <= slowest->own)) continue;
    Straggler found{.rank = each.rank, .step = times.step, .own = times.own, .others_own = own};
    for (const auto phase : {TrainingPhase::kData, TrainingPhase::kForward, TrainingPhase::kBackward,
                             TrainingPhase::kOptimizer}) {
      const double of_others =
          upper_median_of(others, [&](const PhaseTimes& other) { return other.of(phase); });
      if (found.phase != TrainingPhase::kNone &&
          times.of(phase) - of_others <= found.in_phase - found.others_in_phase) {
        continue;
      }
      found.phase = phase;
      found.in_phase = times.of(phase);
      found.others_in_phase = of_others;
    }
    slowest = found;
  }
  return slowest;
}

std::optional<StragglerWatch::Change> StragglerWatch::look(const std::vector<RankPhases>& ranks) {
  const auto found = find_straggler(ranks);
  // Windows that began at unlike moments of an uneven run have unlike steps: that tells nothing of the rank that is slow.
  const bool is_compared = std::any_of(ranks.begin(), ranks.end(), [&](const RankPhases& each) {
    return said_ && each.rank == said_->first && !others_of(each, ranks).empty();
  });
  if (!found && said_ && !is_compared) return std::nullopt;
  Key key;
  if (found) key.emplace(found->rank, found->phase);
  if (key == next_) {
    ++seen_;
  } else {
    next_ = key;
    seen_ = 1;
  }
  if (key == said_ || (ever_ && seen_ < kWindowsToChange)) return std::nullopt;
  ever_ = true;
  Change change{.slow = found, .before = said_ ? said_->first : -1};
  said_ = key;
  return change;
}

std::string describe(const Straggler& straggler) {
  return "it takes " + format_ms(straggler.own) + " a step without waiting, the others " +
         format_ms(straggler.others_own) +
         where_lead_lies(straggler.in_phase - straggler.others_in_phase,
                         straggler.own - straggler.others_own) +
         to_string(straggler.phase) + " (" + format_ms(straggler.in_phase) + ", the others " +
         format_ms(straggler.others_in_phase) + ")";
}

}  // namespace lockstep::transport
