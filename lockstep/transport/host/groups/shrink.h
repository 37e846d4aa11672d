#pragma once

#include <memory>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/transport/host/groups/host_channel.h>

namespace lockstep::transport {

/// What shrink() makes.
struct ShrunkChannels {
  /// Group ranks of the old group, ascending: a survivor's place here is its rank in the new one.
  std::vector<int> survivors;
  std::shared_ptr<HostChannel> channel;
  std::shared_ptr<HostChannel> control;  ///< a second one of the same ranks, if it was asked for
};

/// A new group of those members of `old` that live and are not among `excluded` (group ranks). They all call
/// it, with the same arguments; `old` may have failed in any way, and stays as it is. All get the same
/// survivors, or all throw, whichever rank dies meanwhile; one that dies at the very end is found in the new
/// group. Nothing but the memory that the members share takes part: no store, no rank that must be alive.
///
/// Members that have ended or left are left out without being named. Throws ChannelError: kTimeout when a
/// member lives but did not call it before a rank's deadline, kLeftBehind when the others have gone on
/// without this rank, kAborted and kPeerLeft when another rank's call ended by an error of its own; and what
/// the arena throws when it has no memory. May be called again after any of these but kLeftBehind. One thread
/// at a time for each group.
ShrunkChannels shrink(const HostChannel& old, const std::vector<int>& excluded, bool with_control,
                      const Deadline& deadline);

}  // namespace lockstep::transport
