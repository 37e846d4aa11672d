#include <algorithm>
#include <numeric>

#include <lockstep/base/ranks.h>

namespace lockstep {
namespace {

void sort_and_drop_doubles(std::vector<int>& ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
}

}  // namespace

std::vector<int> all_ranks(int world_size) {
  std::vector<int> ranks(static_cast<size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::string format_ranks(std::vector<int> ranks, int at_most) {
  sort_and_drop_doubles(ranks);
  if (ranks.empty()) return "none";
  std::vector<std::string> entries;
  size_t at = 0;
  while (at < ranks.size() && static_cast<int>(entries.size()) < at_most) {
    size_t last = at;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (last < at + 2) last = at;  // two neighbours read better as "3 and 4"
    entries.push_back(last == at ? std::to_string(ranks[at])
                                 : std::to_string(ranks[at]) + "-" + std::to_string(ranks[last]));
    at = last + 1;
  }
  if (at < ranks.size()) entries.push_back(std::to_string(ranks.size() - at) + " more");
  std::string text = entries.front();
  for (size_t i = 1; i < entries.size(); ++i) text += (i + 1 == entries.size() ? " and " : ", ") + entries[i];
  return text;
}

std::string name_ranks(const std::vector<int>& ranks, int at_most) {
  bool one =
      !ranks.empty() && std::all_of(ranks.begin(), ranks.end(), [&](int r) { return r == ranks.front(); });
  return (one ? "rank " : "ranks ") + format_ranks(ranks, at_most);
}

}  // namespace lockstep
