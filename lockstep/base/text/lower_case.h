#pragma once

#include <algorithm>
#include <cctype>
#include <string>

namespace lockstep {

/// The text with its ASCII letters in lower case; others stay in the "C" locale. Thread-safe.
inline std::string lower_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

}  // namespace lockstep
