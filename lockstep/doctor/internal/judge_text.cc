#include <algorithm>

#include <lockstep/base/ranks.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/doctor/internal/judge_text.h>

namespace lockstep::doctor::internal {

std::string duration(double seconds) {
  const bool micro = seconds < 1e-3;
  return formatted("%.3g %s", seconds * (micro ? 1e6 : 1e3), micro ? "µs" : "ms");
}

std::string tell_errors(const std::map<int, std::string>& errors) {
  std::string text = "rank " + std::to_string(errors.begin()->first) + " says: " + errors.begin()->second;
  std::vector<int> others;
  for (const auto& [rank, error] : errors) {
    if (rank == errors.begin()->first) continue;
    if (errors.size() == 2 && error != errors.begin()->second) {
      return text + "; rank " + std::to_string(rank) + " says: " + error;
    }
    others.push_back(rank);
  }
  return others.empty() ? text : text + " (" + name_ranks(others) + " failed too)";
}

std::string tell_different_errors(const std::map<int, std::string>& errors) {
  constexpr size_t kMost = 4;
  std::map<std::string, std::vector<int>> by_text;
  for (const auto& [rank, error] : errors) by_text[error].push_back(rank);
  if (by_text.size() == 1 || by_text.size() > kMost) return tell_errors(errors);
  std::string text;
  for (const auto& [error, ranks] : by_text) {
    text +=
        (text.empty() ? "" : "; ") + name_ranks(ranks) + (ranks.size() == 1 ? " says: " : " say: ") + error;
  }
  return text;
}

std::optional<int> common_member(const std::vector<Pair>& bad, const std::vector<Pair>& good) {
  if (bad.size() < 2) return std::nullopt;
  const auto has = [](const Pair& pair, int member) { return pair.first == member || pair.second == member; };
  for (const int member : {bad.front().first, bad.front().second}) {
    const auto among = [&](const Pair& pair) { return has(pair, member); };
    if (std::all_of(bad.begin(), bad.end(), among) && std::none_of(good.begin(), good.end(), among))
      return member;
  }
  return std::nullopt;
}

}  // namespace lockstep::doctor::internal
