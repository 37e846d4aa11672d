#include <algorithm>
#include <optional>

#include <c10/util/Exception.h>

#include <lockstep/base/text/parse_number.h>
#include <lockstep/rendezvous/internal/hostlist.h>

namespace lockstep::rendezvous_internal {
namespace {

// So that whatever stands in the variable costs no more memory and stack than a large cluster's list.
constexpr size_t kMostHosts = 65536;
constexpr size_t kMostDigits = 18;  // any number of so many fits into a long, and so does the next one
constexpr size_t kLongestName = 255;
constexpr ptrdiff_t kMostBrackets = 16;  // in one name

std::optional<long> whole_number(std::string_view text) {
  if (text.size() > kMostDigits) return std::nullopt;
  const auto number = parse_number<long>(text);
  return number && *number >= 0 ? number : std::nullopt;
}

/// Splits at commas that stand outside of brackets; nothing when the brackets do not match.
std::optional<std::vector<std::string_view>> split(std::string_view list) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i] == '[' && ++depth > 1) return std::nullopt;
    if (list[i] == ']' && --depth < 0) return std::nullopt;
    if (list[i] == ',' && depth == 0) {
      parts.push_back(list.substr(begin, i - begin));
      begin = i + 1;
    }
  }
  if (depth != 0) return std::nullopt;
  parts.push_back(list.substr(begin));
  return parts;
}

/// "01-03,7" → 01 02 03 7; the width of a range's first number is kept.
std::optional<std::vector<std::string>> expand_numbers(std::string_view ranges) {
  std::vector<std::string> numbers;
  auto parts = split(ranges);
  if (!parts) return std::nullopt;
  for (auto part : *parts) {
    auto dash = part.find('-');
    auto low_text = part.substr(0, dash);
    auto low = whole_number(low_text);
    auto high = dash == std::string_view::npos ? low : whole_number(part.substr(dash + 1));
    if (!low || !high || *high < *low || static_cast<size_t>(*high - *low) >= kMostHosts) return std::nullopt;
    for (long n = *low; n <= *high; ++n) {
      auto digits = std::to_string(n);
      if (digits.size() < low_text.size()) digits.insert(0, low_text.size() - digits.size(), '0');
      numbers.push_back(std::move(digits));
    }
    if (numbers.size() > kMostHosts) return std::nullopt;
  }
  return numbers;
}

/// One entry with any number of brackets.
std::optional<std::vector<std::string>> expand_name(std::string_view name) {
  auto open = name.find('[');
  if (std::min(open, name.size()) > kLongestName) return std::nullopt;
  if (open == std::string_view::npos) {
    if (name.empty()) return std::nullopt;
    return std::vector<std::string>{std::string(name)};
  }
  auto close = name.find(']', open);
  auto numbers = expand_numbers(name.substr(open + 1, close - open - 1));
  if (!numbers) return std::nullopt;
  std::vector<std::string> rests = {""};
  if (close + 1 < name.size()) {
    auto expanded = expand_name(name.substr(close + 1));
    if (!expanded) return std::nullopt;
    rests = std::move(*expanded);
  }
  if (numbers->size() * rests.size() > kMostHosts) return std::nullopt;
  std::vector<std::string> names;
  for (const auto& number : *numbers) {
    for (const auto& rest : rests) names.push_back(std::string(name.substr(0, open)) + number + rest);
  }
  return names;
}

}  // namespace

std::vector<std::string> expand_hostlist(std::string_view list) {
  std::vector<std::string> hosts;
  auto parts = split(list);
  bool good = parts.has_value();
  for (size_t i = 0; good && i < parts->size(); ++i) {
    const auto part = (*parts)[i];
    if (std::count(part.begin(), part.end(), '[') > kMostBrackets) {
      good = false;
      break;
    }
    auto names = expand_name(part);
    good = names && hosts.size() + names->size() <= kMostHosts;
    if (good) hosts.insert(hosts.end(), names->begin(), names->end());
  }
  TORCH_CHECK_VALUE(good, "'", list, "' is not a list of hosts such as node[01-03,7],other");
  return hosts;
}

std::vector<int> expand_tasks_per_node(std::string_view list) {
  std::vector<int> counts;
  auto parts = split(list);
  bool good = parts.has_value();
  for (size_t i = 0; good && i < parts->size(); ++i) {
    auto part = (*parts)[i];
    auto open = part.find("(x");
    std::optional<long> times = 1;
    if (open != std::string_view::npos) {
      times =
          part.ends_with(')') ? whole_number(part.substr(open + 2, part.size() - open - 3)) : std::nullopt;
    }
    auto tasks = whole_number(part.substr(0, open));
    good = tasks && times && *tasks < 1 << 24 && counts.size() + static_cast<size_t>(*times) <= kMostHosts;
    if (good) counts.insert(counts.end(), static_cast<size_t>(*times), static_cast<int>(*tasks));
  }
  TORCH_CHECK_VALUE(good, "'", list, "' is not a list of tasks per node such as 2(x3),1");
  return counts;
}

}  // namespace lockstep::rendezvous_internal
