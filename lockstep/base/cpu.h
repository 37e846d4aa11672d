#pragma once

namespace lockstep {

/// Cores that this process may run on (its affinity mask), at least 1.
int usable_cores();

}  // namespace lockstep
