#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <lockstep/collectives/groups/internal/group_making.h>
#include <lockstep/collectives/groups/internal/group_registry.h>

/// The backends that a group has for devices beside Lockstep's own: NCCL's. Thread-safe.
namespace lockstep::collectives::internal::device_backends {

/// Which backend the members of groups get that asked for `asked`: see device_agreement.h. `lists`: where
/// each group's members stand in the meeting, by group rank; all ranks of the meeting call it with the same
/// lists, of which the first rank logs the warnings. Throws on all of them: c10::ValueError with the remedy
/// when the backend can't be had for one of the groups, c10::DistBackendError when the ranks asked for
/// different ones. `call` begins the messages.
std::string agree(const group_making::Gather& gather, const std::string& call, int rank,
                  const std::string& asked, const std::vector<std::vector<int>>& lists);

/// Makes the backends that the plan asks for, and tells the group's handle which backend serves which device.
/// Collective over the members where it makes any; then all members have them, or all throw.
void open(RegisteredGroup& group, const DefaultWorld& world, const group_making::GroupPlan& plan);

void set_timeout(const RegisteredGroup& group, std::chrono::milliseconds timeout);

/// Fails what they do, on this rank; NCCL's peers find out by themselves. Never throws.
void abort(const RegisteredGroup& group);
/// Ends them: finishes what was submitted, unless `aborting`, the group has failed, or a peer has ended
/// without leaving it, for which NCCL would wait for ever. Never throws.
void end(const RegisteredGroup& group, bool aborting);

}  // namespace lockstep::collectives::internal::device_backends
