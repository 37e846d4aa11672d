#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/launch/membership/membership.h>
#include <lockstep/launch/membership/messages.h>

namespace lockstep::launch {

/// The coordinator's memory: what the agents have said, and the last decision. Makes no input or output and asks no
/// clock, so that a simulation runs it as it is. Not thread-safe.
class Coordinator {
 public:
  /// `job` names this coordinator's process; `own` is the agent beside it. `options` have passed objection_to().
  Coordinator(const MembershipOptions& options, const std::array<uint8_t, 16>& job, const AgentId& own,
              BootTime now);

  /// What to answer an agent that can't take part, for it has other options than this one: see common_options(). Nothing for
  /// one that can. To be asked before the first receive().
  std::optional<Order> refusal_of(const Status& status);
  /// An agent's status has come; the first one makes it a member. False, and nothing has changed, where there are
  /// already kMostMembers.
  bool receive(const Status& status, BootTime now);
  /// The agent's connection has been closed.
  void disconnected(const AgentId& agent);
  /// Decides once, and carries the decision out: the world changes, and so do the orders. To be called after
  /// messages, and at look_again_at, until the action is kWait or kDone. `start` is called before a generation
  /// starts, with its number.
  MembershipDecision advance(BootTime now);

  /// What hosts other than the coordinator's have said of workers that failed, and which hosts were refused; each report once.
  /// With MembershipOptions::one_command only the latter: all hosts' agents write their reports to one output then.
  std::vector<std::string> take_reports() { return std::exchange(reports_, {}); }
  /// What that agent is to do now.
  Order order_for(const AgentId& agent) const;
  /// Whether some host wants all hosts' reports.
  bool watched() const;
  const MembershipState& world() const { return world_; }
  const std::vector<Member>& members() const { return members_; }
  int exit_status() const { return exit_status_; }

  static constexpr size_t kMostMembers = 8192;

 private:
  void enter(MembershipPhase phase, const std::string& reason, BootTime now);
  void start(const MembershipDecision& decision);
  int losses_before(const Status& newcomer, BootTime now) const;
  void drop_predecessors(const Status& newcomer, BootTime now);
  bool may_be_dropped(const Member& member, BootTime now) const;
  std::string why_not_taken(const Member* member) const;
  Member* find(const AgentId& agent);
  const Member* find(const AgentId& agent) const { return const_cast<Coordinator*>(this)->find(agent); }

  MembershipOptions options_;
  std::array<uint8_t, 16> job_;
  AgentId own_;
  MembershipState world_;
  std::vector<Member> members_;
  std::vector<std::string> reports_;
  std::vector<Place> places_;  // by group rank, of the last generation
  uint64_t question_ = 0;      // the world's order in which statuses were asked for last
  std::string reason_;         // of the last decision that changed something
  std::string waiting_for_;    // of the last one that did not
  int exit_status_ = 0;
};

}  // namespace lockstep::launch
