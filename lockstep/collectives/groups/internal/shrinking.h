#pragma once

#include <vector>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/transport/host/shrink.h>

/// What shrink_group() and LockstepBackend::shrink() have in common.
namespace lockstep::shrinking {

/// Checks the arguments, with the errors of torch.distributed.shrink_group; finishes what the group was
/// given, or aborts it; and makes the channels of the ranks that go on. Collective over them. Throws as
/// shrink_group().
transport::ShrunkChannels shrink(LockstepBackend& backend, const std::vector<int>& ranks_to_exclude,
                                 int shrink_flags, bool with_control);

}  // namespace lockstep::shrinking
