#pragma once

#include <array>
#include <cstdarg>
#include <cstdio>
#include <string>

namespace lockstep {

/// printf into a string; longer text is cut at 511 bytes. Thread-safe.
[[gnu::format(printf, 1, 2)]] inline std::string formatted(const char* format, ...) {
  std::array<char, 512> text{};
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text.data(), text.size(), format, arguments);
  va_end(arguments);
  return text.data();
}

}  // namespace lockstep
