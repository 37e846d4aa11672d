#pragma once

#include <string>
#include <vector>

namespace lockstep::parquet::internal {

/// 'a', 'b' and so on, for messages; of very many the first ones and how many there are.
inline std::string quoted_list(const std::vector<std::string>& names) {
  constexpr size_t kShown = 30;
  if (names.empty()) return "none";
  std::string text;
  for (size_t i = 0; i < names.size() && i < kShown; ++i) text += (i > 0 ? ", '" : "'") + names[i] + "'";
  if (names.size() > kShown) text += ", … (" + std::to_string(names.size()) + " in all)";
  return text;
}

}  // namespace lockstep::parquet::internal
