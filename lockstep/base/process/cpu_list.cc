#include <cstdint>
#include <sstream>

#include <lockstep/base/process/cpu_list.h>
#include <lockstep/base/text/parse_number.h>

namespace lockstep {

std::vector<int> parse_cpu_list(const std::string& text) {
  constexpr int64_t kMost = 1 << 20;
  std::vector<int> cores;
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto dash = entry.find('-', 1);
    const auto first = parse_number<int64_t>(entry.substr(0, dash));
    const auto last = dash == std::string::npos ? first : parse_number<int64_t>(entry.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last >= kMost) return {};
    for (int64_t core = *first; core <= *last; ++core) cores.push_back(static_cast<int>(core));
  }
  return cores;
}

std::string format_cpu_list(const std::vector<int>& cores) {
  std::string text;
  for (size_t at = 0; at < cores.size();) {
    size_t last = at;
    while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(cores[at]);
    if (last > at) text += "-" + std::to_string(cores[last]);
    at = last + 1;
  }
  return text;
}

}  // namespace lockstep
