#pragma once

#include <vector>

#include <lockstep/collectives/process_group.h>

namespace lockstep {

/// When one of a rank's groups has failed, fails its others with the same cause: ranks that wait in those may not be in that one.
/// Where several have, the first in the list tells. Null groups are passed over. Does not wait; from any thread.
void spread_failure(const std::vector<ProcessGroup>& groups) noexcept;

}  // namespace lockstep
