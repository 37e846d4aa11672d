#pragma once

#include <cstddef>
#include <string>

namespace lockstep {

/// Text from elsewhere (a file, a server) for a message, which may be written to a terminal: no control
/// characters, and not all of it if it is longer than `most` bytes. UTF-8 stays.
inline std::string printable(std::string text, size_t most = 200) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  if (text.size() > most) text.replace(most, std::string::npos, "…");
  return text;
}

}  // namespace lockstep
