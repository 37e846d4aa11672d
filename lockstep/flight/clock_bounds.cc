#include <algorithm>
#include <cstdlib>
#include <limits>
#include <optional>

#include <lockstep/flight/clock_bounds.h>

namespace lockstep::flight {
namespace {

/// Of offsets: sums and differences of two don't overflow.
constexpr int64_t kMostOffset = std::numeric_limits<int64_t>::max() / 4;

/// most[i][j]: clock i is ahead of clock j by at most that; none: nothing is known.
using Most = std::vector<std::vector<std::optional<int64_t>>>;

/// What follows over others: the shortest way from each to each (Floyd and Warshall).
void close(Most& most) {
  for (size_t over = 0; over < most.size(); ++over) {
    for (size_t i = 0; i < most.size(); ++i) {
      for (size_t j = 0; j < most.size(); ++j) {
        if (i == j || !most[i][over] || !most[over][j]) continue;
        const int64_t sum = std::clamp(*most[i][over] + *most[over][j], -kMostOffset, kMostOffset);
        most[i][j] = std::min(most[i][j].value_or(kMostOffset), sum);
      }
    }
  }
}

}  // namespace

void ClockBounds::add(const std::string& clock_of_cause, int64_t cause_ns, const std::string& clock_of_effect,
                      int64_t effect_ns) {
  if (clock_of_cause == clock_of_effect) return;
  // cause - offset_of_cause <= effect - offset_of_effect, so offset_of_effect is ahead by at most effect - cause.
  const int64_t slack = std::clamp(effect_ns - cause_ns, -kMostOffset, kMostOffset);
  const auto [place, fresh] = slack_.try_emplace({clock_of_cause, clock_of_effect}, slack);
  if (!fresh) place->second = std::min(place->second, slack);
}

std::map<std::string, ClockOffset> ClockBounds::offsets(const std::string& reference) const {
  std::vector<std::string> clocks = {reference};
  for (const auto& [pair, slack] : slack_) {
    for (const std::string& clock : {pair.first, pair.second}) {
      if (std::find(clocks.begin(), clocks.end(), clock) == clocks.end()) clocks.push_back(clock);
    }
  }
  const auto place = [&](const std::string& clock) {
    return static_cast<size_t>(std::find(clocks.begin(), clocks.end(), clock) - clocks.begin());
  };
  Most most(clocks.size(), std::vector<std::optional<int64_t>>(clocks.size()));
  for (const auto& [pair, slack] : slack_) most[place(pair.second)][place(pair.first)] = slack;
  close(most);
  // One after the other, within what those that are known already leave; since all that follows is known, that is never
  // empty where the pairs agree.
  std::map<std::string, ClockOffset> known = {{reference, {}}};
  for (size_t i = 1; i < clocks.size(); ++i) {
    if (!most[i][0] || !most[0][i]) continue;
    const int64_t least_of_all = -*most[0][i], largest_of_all = *most[i][0];
    int64_t least = least_of_all, largest = largest_of_all;
    for (size_t j = 1; j < i; ++j) {
      const auto other = known.find(clocks[j]);
      if (other == known.end()) continue;
      if (most[i][j]) largest = std::min(largest, other->second.ns + *most[i][j]);
      if (most[j][i]) least = std::max(least, other->second.ns - *most[j][i]);
    }
    const int64_t ns = std::clamp(least + (largest - least) / 2, -kMostOffset, kMostOffset);
    // To both ends of what is possible: what the clocks before leave need not be its middle. Where pairs contradict each
    // other, the ends are the wrong way round, and the distance to each is as large.
    const int64_t error = std::max(std::abs(ns - least_of_all), std::abs(largest_of_all - ns));
    known[clocks[i]] = {ns, std::min(error, kMostOffset)};
  }
  return known;
}

}  // namespace lockstep::flight
