#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/base/deadline.h>
#include <lockstep/transport/group_channel.h>

namespace lockstep::collectives::internal::shrinking {

/// The living members of a group over several hosts agree on which of them go on without the others: in the job's store,
/// so that those that don't reach it have no part in it. On one host they need no store: see
/// transport::MembershipAgreement, whose rules are the same.
///
/// They meet in *rounds*, numbered from 1. In a round each says which members it would go on with: those that are not
/// excluded, and live as far as it knows. When all of the largest set that wants itself have come, one of them enters
/// it into the round's decision, where the first entry stays, and all follow it. Then they make the group, which
/// succeeds on all or on none by the round's outcome, a second such entry; when one of them has ended meanwhile, they
/// meet in the next round. docs/internals/hosts_protocol.md has the rest. Ranks are group ranks. One thread.
class StoreMembership {
 public:
  using RankSet = std::set<int>;

  StoreMembership(c10d::Store& store, const transport::GroupChannel& group, const std::vector<int>& excluded,
                  const Deadline& deadline);

  /// The decision of a round that this rank takes part in: which ranks go on, this one among them. Throws ChannelError on
  /// all that take part: kTimeout when a member lives but did not come before a rank's deadline, kAborted when one was
  /// interrupted; on this rank alone kLeftBehind when the others have gone on without it, and what the store throws.
  std::vector<int> agree();
  /// Begins the keys of what the members exchange in this round.
  const std::string& key() const { return key_; }

  /// For a rank that has got the round's group: whether all have. Otherwise they meet again. Throws as agree().
  bool conclude(const transport::GroupChannel& made);
  /// For a rank that has not: returns if they meet again, because one of them has ended. Throws `failure` otherwise, and
  /// a ChannelError on the others.
  void give_up(const std::exception_ptr& failure);

 private:
  struct Standing {
    RankSet set;      // those with which this rank may go on, as far as it knows
    RankSet missing;  // of these, those that have not come
    bool complete = false;
  };

  std::optional<std::string> look(const char* name);
  std::string decide(const char* name, const std::string& value);
  void enter();
  bool has_passed();
  RankSet wanted_now() const;
  void publish(RankSet set);
  void read_records();
  Standing standing() const;
  bool must_yield(const RankSet& set);
  void ask_missing(const RankSet& missing);
  std::string await_decision();
  void withdraw();
  std::vector<int> follow(const std::string& decided);
  bool follow_outcome(const std::string& outcome);
  void end_attempt(const std::exception_ptr& failure);
  void end_exchanges(const std::string& text);
  std::optional<std::string> lost_survivor() const;
  std::vector<int> peers_of(const RankSet& ranks) const;
  std::string describe(const RankSet& ranks) const;
  [[noreturn]] void fail_left_behind(RankSet survivors) const;

  c10d::Store& store_;
  const transport::GroupChannel& group_;
  const Deadline deadline_;
  const std::chrono::nanoseconds timeout_;
  const std::string prefix_;
  RankSet wanted_;  // all but the excluded ones

  uint64_t round_ = 0;
  std::string key_;
  RankSet published_;
  std::map<int, RankSet> records_;    // what the others have said in this round
  std::optional<Deadline> patience_;  // with ranks that may be cut off
  bool asked_ = false;
  RankSet survivors_;  // as decided
};

}  // namespace lockstep::collectives::internal::shrinking
