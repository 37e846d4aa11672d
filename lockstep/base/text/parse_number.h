#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace lockstep {

/// The whole text as a decimal number, as std::from_chars() reads it: no blanks, no '+', and '-' for signed types alone.
/// Nothing for other text, for empty text, and for a number that does not fit into T. Thread-safe.
template <class T>
std::optional<T> parse_number(std::string_view text) {
  T number{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end) return std::nullopt;
  return number;
}

}  // namespace lockstep
