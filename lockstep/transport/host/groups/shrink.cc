#include <optional>
#include <utility>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/log.h>
#include <lockstep/transport/host/groups/membership_agreement.h>
#include <lockstep/transport/host/groups/shrink.h>

namespace lockstep::transport {
namespace {

using OwnBlock = GroupMembers::OwnBlock;

/// An operation of the new group that succeeds on all survivors or on none: only then has the shrinking
/// succeeded.
void confirm(HostChannel& channel, const Deadline& deadline) {
  channel.begin(deadline, /*background=*/false);
  channel.announce({});
  channel.await_announcements();
  channel.commit();
  if (const auto interruption = channel.take_interruption()) std::rethrow_exception(interruption);
}

/// The members of one of the new groups; `which` of each survivor's addresses it is.
std::shared_ptr<GroupMembers> open_members(const GroupMembers& old,
                                           const MembershipAgreement::Agreement& agreement, size_t which,
                                           const OwnBlock& own, const Deadline& deadline) {
  std::vector<int> ranks;
  std::vector<uint64_t> words;
  for (size_t i = 0; i < agreement.ranks.size(); ++i) {
    ranks.push_back(old.transport_rank(agreement.ranks[i]));
    words.push_back(agreement.addresses[i][which]);
  }
  return GroupMembers::open(old.shared_transport(), std::move(ranks), own, words, deadline);
}

/// This rank's memory for one attempt.
struct OwnBlocks {
  OwnBlocks(HostTransport& transport, int most_members, bool with_control) : block(transport, most_members) {
    if (!with_control) return;
    try {
      control.emplace(transport, most_members);
    } catch (...) {
      block.give_back();
      throw;
    }
  }

  MembershipAgreement::Addresses words() const { return {block.word(), control ? control->word() : 0}; }
  void give_back() {
    block.give_back();
    if (control) control->give_back();
  }

  OwnBlock block;
  std::optional<OwnBlock> control;
};

MembershipAgreement::Agreement agree(MembershipAgreement& membership, const RankSet& wanted, OwnBlocks& own,
                                     const Deadline& deadline) {
  try {
    return membership.agree(wanted, own.words(), deadline);
  } catch (...) {
    own.give_back();  // no rank uses them
    throw;
  }
}

/// One attempt to make what was agreed on.
ShrunkChannels make(const GroupMembers& old, const MembershipAgreement::Agreement& agreement,
                    const OwnBlocks& own, const Deadline& deadline) {
  // From here on all that goes wrong is decided in the new group: its members tell each other by leaving it.
  auto members = open_members(old, agreement, 0, own.block, deadline);
  if (agreement.interruption) std::rethrow_exception(agreement.interruption);
  ShrunkChannels made;
  made.survivors = agreement.ranks;
  if (own.control) {
    made.control = HostChannel::open_beside(open_members(old, agreement, 1, *own.control, deadline));
  }
  made.channel = HostChannel::open(std::move(members), deadline);
  failpoint::here("shrink_joined");
  confirm(*made.channel, deadline);
  return made;
}

}  // namespace

// It ends: a round ends by a decision, at the latest at a rank's deadline, and then throws on all, or gives a
// set. Another round follows only when a member of the set has ended (no member ends twice), or when the
// others decided further rounds while this rank slept, which they do no more once it has entered the next.
ShrunkChannels shrink(const HostChannel& old_channel, const std::vector<int>& excluded, bool with_control,
                      const Deadline& deadline) {
  const GroupMembers& old = old_channel.members();
  RankSet wanted = RankSet::all(old.size());
  for (int rank : excluded) wanted.erase(rank);
  MembershipAgreement membership(old);
  while (true) {
    failpoint::here("shrink");
    OwnBlocks own(old.transport(), old.size(), with_control);
    const auto agreement = agree(membership, wanted, own, deadline);
    failpoint::here("shrink_agreed");
    if (agreement.overtaken) {
      // The others may have counted on this rank in a round that has failed since, and still touch its
      // blocks: their memory stays.
      if (agreement.interruption) std::rethrow_exception(agreement.interruption);
      continue;
    }
    try {
      ShrunkChannels made = make(old, agreement, own, deadline);
      membership.confirm(agreement);
      failpoint::here("shrink_made");
      return made;
    } catch (const ChannelError& error) {
      // The new group's outcome: all survivors come here, or none.
      if (error.kind() != FailureKind::kPeerEnded) throw;
      LOCKSTEP_LOG(kInfo) << "shrinking the group begins anew: " << error.what();
    }
  }
}

}  // namespace lockstep::transport
