#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

/// UTF-8 text without control characters and wide letters, as a terminal shows it. Pure functions.
namespace lockstep::terminal_text {

/// Whether a character begins with this byte.
inline bool begins_character(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0) != 0x80;
}

/// How many columns it takes.
inline int columns(std::string_view text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), begins_character));
}

/// The first `width` characters.
inline std::string cut(std::string text, int width) {
  int seen = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (begins_character(text[i]) && seen++ == width) {
      text.resize(i);
      break;
    }
  }
  return text;
}

}  // namespace lockstep::terminal_text
