#pragma once

#include <chrono>

#include <lockstep/transport/group_channel.h>

namespace lockstep::collectives::internal {

/// Returns when all members have called it for the `round`-th time. Rank 0 waits `timeout` for the others,
/// then throws DistTimeoutError that names the first missing rank, or with `wait_all_ranks` all of them;
/// the ranks that came are told and throw the same. A member that ended is named with its cause. The group stays
/// usable.
void monitored_barrier(transport::GroupChannel& channel, std::chrono::milliseconds timeout,
                       bool wait_all_ranks, uint64_t round);

}  // namespace lockstep::collectives::internal
