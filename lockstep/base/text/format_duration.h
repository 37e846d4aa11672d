#pragma once

#include <chrono>
#include <sstream>
#include <string>

namespace lockstep {

/// A duration for people: "60 ms" below a second, "5 s" or "1.5 s" above.
inline std::string format_duration(std::chrono::nanoseconds duration) {
  const auto milliseconds = std::chrono::round<std::chrono::milliseconds>(duration);
  std::ostringstream text;
  if (milliseconds < std::chrono::seconds(1)) {
    text << milliseconds.count() << " ms";
  } else {
    text << std::chrono::duration<double>(milliseconds).count() << " s";
  }
  return text.str();
}

}  // namespace lockstep
