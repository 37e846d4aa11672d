#pragma once

#include <cstddef>
#include <string>

namespace lockstep {

/// Text from elsewhere (a file, a server) for a message, which may be written to a terminal: no control
/// characters, and not all of it if it is longer than `most` bytes. UTF-8 stays.
inline std::string printable(std::string text, size_t most = 200) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x20 || byte == 0x7f) text[i] = '?';
    // U+0080 to U+009F are control characters, too.
    if (i > 0 && text[i - 1] == '\xc2' && byte >= 0x80 && byte < 0xa0) text[i - 1] = text[i] = '?';
  }
  if (text.size() > most) text.replace(most, std::string::npos, "…");
  return text;
}

}  // namespace lockstep
