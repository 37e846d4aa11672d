#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/transport/host/groups/channel_layout.h>
#include <lockstep/transport/host/groups/group_members.h>

namespace lockstep::transport {

/// A set of a group's ranks. A value.
class RankSet {
 public:
  /// Ranks 0 to `size`−1.
  static RankSet all(int size);

  bool contains(int rank) const { return (words_[rank / 64] >> rank % 64 & 1) != 0; }
  void erase(int rank) { words_[rank / 64] &= ~(uint64_t{1} << rank % 64); }
  RankSet& operator&=(const RankSet& other);
  bool operator==(const RankSet& other) const = default;
  /// Ascending.
  std::vector<int> ranks() const;

  void store_to(layout::SharedRankSet& shared) const;
  static RankSet load_from(const layout::SharedRankSet& shared);

 private:
  std::array<uint64_t, std::tuple_size_v<layout::SharedRankSet>> words_{};
};

/// Where the living members of a group agree on which of them go on without the others, in the control blocks
/// that they still have mapped: no store, no connection, and no rank that must be alive.
///
/// They meet in *rounds*, numbered from 1. In a round each says which members it would go on with (`wanted`)
/// and where its control blocks for the new groups lie. When all that a rank would go on with, which live,
/// and which each of them wants too, have said so, it tries to enter this set into the round's decision; the
/// first entry stays, and all follow it. A rank that can wait no longer tries to enter its failure instead.
/// So a round has one result for all. docs/internals/shared_memory_protocol.md has the proof. Ranks here are group
/// ranks.
///
/// One thread of a process at a time; left_behind() from any. Lifetime: within that of the members.
class MembershipAgreement {
 public:
  using Addresses = std::array<uint64_t, 2>;
  struct Agreement {
    uint64_t round = 0;
    std::vector<int> ranks;            // ascending, this one among them
    std::vector<Addresses> addresses;  // by place in `ranks`
    /// The others have gone to later rounds while this rank was slow; `ranks` and `addresses` are not known.
    bool overtaken = false;
    /// What ended this rank's wait after the others had counted on it: it is to let them know, and rethrow
    /// it.
    std::exception_ptr interruption;
  };

  explicit MembershipAgreement(const GroupMembers& members) : members_(members), own_(members.rank()) {}

  /// One round, whose number it gives. `wanted`: this rank among them; ended members and those that have left
  /// are taken out here. Throws ChannelError on all that take part: kTimeout when a wanted rank lives but did
  /// not come before a rank's deadline, kAborted when a rank was interrupted; and on this rank alone
  /// kLeftBehind when the others have agreed without it. After a ChannelError no rank uses `own`.
  Agreement agree(const RankSet& wanted, const Addresses& own, const Deadline& deadline);

  /// Says that this rank has got the group that the round was about. To be said before it leaves the old one.
  void confirm(const Agreement& agreement);

  /// Whether others go on without this rank: the last round was agreed on by ranks that don't count this one
  /// among them, or they have confirmed it and this rank has not.
  bool left_behind() const { return survivors_without_me().has_value(); }

 private:
  struct Standing {
    RankSet set;               // those with which this rank may go on, as far as it knows
    std::vector<int> missing;  // of these, those that have not said so yet
    bool complete = false;
  };

  layout::Recovery& recovery(int rank) const { return members_.block(rank).recovery; }
  layout::RecoveryRecord& record(int rank, uint64_t round) const { return recovery(rank).records[round & 1]; }
  Decision decision() const;
  bool decide(const Decision& wanted);
  void ring_all() const;

  uint64_t enter(const RankSet& wanted, const Addresses& own);
  std::optional<RankSet> wanted_by(int rank, uint64_t round) const;
  std::optional<RankSet> agreed_by(int rank, uint64_t round) const;
  std::optional<Addresses> addresses_of(int rank, uint64_t round) const;
  Standing standing(const RankSet& wanted, uint64_t round) const;
  void await_decision(const RankSet& wanted, uint64_t round, const Deadline& deadline);
  Agreement result_of(uint64_t round) const;
  uint64_t confirmed_by(int rank) const;
  bool has_missed_a_group() const;
  std::optional<RankSet> survivors_without_me() const;
  [[noreturn]] void fail(const Decision& decided) const;
  [[noreturn]] void fail_left_behind(const RankSet& survivors) const;

  const GroupMembers& members_;
  const int own_;
  std::string waited_for_;  // what this rank has to say of its own timeout
};

}  // namespace lockstep::transport
