#pragma once

#include <string_view>

namespace lockstep {

/// The text without the ASCII blanks at its ends. A view of the given one.
inline std::string_view without_blanks(std::string_view text) {
  const auto blank = [](char c) { return c == ' ' || (c >= '\t' && c <= '\r'); };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return text;
}

}  // namespace lockstep
