#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

/// Typed reading of environment variables. An empty variable counts as unset. Thread-safe as long as no
/// thread calls setenv(3) at the same time.
namespace lockstep::environment {

/// The variable's text, or nothing when it is unset or empty.
std::optional<std::string> text(const char* name);

/// `value`, which the variable `name` holds, as a whole decimal number. Throws c10::ValueError that names the
/// variable, its value and the range when it is not a number or lies outside [low, high].
int64_t parse_integer(const char* name, const std::string& value, int64_t low, int64_t high);

/// parse_integer() of the variable; nothing when it is unset or empty.
std::optional<int64_t> integer(const char* name, int64_t low = std::numeric_limits<int64_t>::min(),
                               int64_t high = std::numeric_limits<int64_t>::max());

/// True for 1, true, yes, on; false for unset, 0, false, no, off (any case). Anything else throws
/// c10::ValueError.
bool flag(const char* name);

}  // namespace lockstep::environment
