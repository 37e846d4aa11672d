#pragma once

#include <string_view>

namespace lockstep {

/// Whether a line belongs to a C++ stack as c10's errors and PyTorch's warnings have it: "Exception raised from …" and "frame
/// #0: …" (c10/util/Exception.cpp, c10/util/Backtrace.cpp).
inline bool is_stack_line(std::string_view line) {
  return line.starts_with("frame #") || line.starts_with("Exception raised from ") ||
         line == "<omitting python frames>";
}

}  // namespace lockstep
