#pragma once

namespace lockstep::python {

/// From now on Python's signal handlers (Ctrl-C among them) run while a call of the engine waits in the main
/// thread; what they raise ends the wait and reaches the caller.
void watch_signals();

}  // namespace lockstep::python
