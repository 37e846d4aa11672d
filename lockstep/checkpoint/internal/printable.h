#pragma once

#include <string>

namespace lockstep::internal {

/// Text of a file for a message, which may be written to a terminal: no control characters, and not all of it
/// if it is long. UTF-8 stays.
inline std::string printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  if (text.size() > 200) text.replace(200, std::string::npos, "…");
  return text;
}

}  // namespace lockstep::internal
