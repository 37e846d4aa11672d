#pragma once

#include <concepts>
#include <string>

namespace lockstep {

/// A number of things, for messages: "1 rank", "3 ranks". For nouns that take an s. Thread-safe.
template <std::integral Number>
std::string counted(Number number, const std::string& noun) {
  return std::to_string(number) + " " + noun + (number == 1 ? "" : "s");
}

}  // namespace lockstep
