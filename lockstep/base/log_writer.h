#pragma once

#include <string_view>

namespace lockstep::log {

/// Writes whole lines; they may come from any thread.
using Writer = void (*)(std::string_view line);

/// Lets `writer` write all lines of the log (log.h) from now on; without one they go to standard error. For
/// what must know of other output there, as a progress bar. Thread-safe.
void set_writer(Writer writer);

}  // namespace lockstep::log
