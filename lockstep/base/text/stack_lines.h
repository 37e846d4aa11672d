#pragma once

#include <string_view>

namespace lockstep {

/// Whether a line belongs to a C++ stack as c10's errors and PyTorch's warnings have it: "Exception raised from …" and "frame
/// #0: …" (c10/util/Exception.cpp, c10/util/Backtrace.cpp).
inline bool is_stack_line(std::string_view line) {
  constexpr std::string_view kFrame = "frame #", kFrom = "Exception raised from ";
  if (line.starts_with(kFrame)) {
    const size_t end = line.find_first_not_of("0123456789", kFrame.size());
    return end != kFrame.size() && end != line.npos && line.substr(end).starts_with(": ");
  }
  return (line.starts_with(kFrom) && line.ends_with(" (most recent call first):")) ||
         line == "<omitting python frames>";
}

}  // namespace lockstep
