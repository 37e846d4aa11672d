#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <lockstep/base/text/parse_number.h>

namespace lockstep {

/// With which a launcher begins each line of that rank: "[rank 3] ".
inline std::string rank_mark(int rank) {
  return "[rank " + std::to_string(rank) + "] ";
}

/// The rank whose mark the line begins with, which is left without it; nothing, and the line as it is, where there is none.
inline std::optional<int> take_rank_mark(std::string_view& line) {
  constexpr std::string_view kBegin = "[rank ", kEnd = "] ";
  const size_t end = line.find(kEnd);
  if (!line.starts_with(kBegin) || end == line.npos) return std::nullopt;
  const auto rank = parse_number<int>(line.substr(kBegin.size(), end - kBegin.size()));
  if (!rank || *rank < 0) return std::nullopt;
  line.remove_prefix(end + kEnd.size());
  return rank;
}

}  // namespace lockstep
