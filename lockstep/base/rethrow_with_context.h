#pragma once

#include <string>

namespace lockstep {

/// To be called in a catch block: throws the caught exception again with `context` added to its message. c10
/// errors keep their type; any other becomes a c10::Error that nests the original (std::nested_exception).
[[noreturn]] void rethrow_with_context(const std::string& context);

}  // namespace lockstep
