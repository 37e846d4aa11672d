#pragma once

#include <memory>
#include <vector>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/transport/group_channel.h>

/// What shrink_group() and LockstepBackend::shrink() have in common.
namespace lockstep::collectives::internal::shrinking {

/// What shrink() makes.
struct Shrunk {
  /// Group ranks of the old group, ascending: a survivor's place here is its rank in the new one.
  std::vector<int> survivors;
  std::shared_ptr<transport::GroupChannel> channel;
  std::shared_ptr<transport::GroupChannel> control;
};

/// Checks the arguments, with the errors of torch.distributed.shrink_group; finishes what the group was
/// given, or aborts it; and makes the channels of the ranks that go on. Collective over them. Throws as
/// shrink_group().
Shrunk shrink(LockstepBackend& backend, const std::vector<int>& ranks_to_exclude, int shrink_flags,
              bool with_control);

}  // namespace lockstep::collectives::internal::shrinking
