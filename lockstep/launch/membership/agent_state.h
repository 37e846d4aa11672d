#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <lockstep/launch/membership/membership.h>
#include <lockstep/launch/membership/messages.h>

namespace lockstep::launch {

/// What one agent has to do: a state machine between the coordinator's orders, this host's workers and the clock.
/// Makes no input or output and asks no clock, so that a simulation runs it as it is. Not thread-safe.
class AgentState {
 public:
  enum class Phase : uint8_t {
    kIdle,      // no workers; the coordinator may not have answered yet
    kRunning,   // workers run
    kYielding,  // they were asked to stop, and how they end is told
    kStopping,  // they were asked to end
    kLapsed,    // the lease was over while they ran: they are to be killed
    kKilled,    // they were
    kEnded,     // the agent is to end with exit_status(); there are no workers
  };
  enum class Action : uint8_t { kNothing, kStart, kStop, kKill };

  /// `self`: this agent's identity; its phase and what follows are filled in here.
  AgentState(const Status& self, const MembershipOptions& options, BootTime now);

  /// An order has come. What is older than one that was seen before renews the lease at most.
  void receive(const Order& order, BootTime now);
  /// The coordinator's host answers that nothing listens there: its agent has ended.
  void refused(BootTime now);
  /// The lease that the workers' guardian knew of was over, be it that this process was stopped meanwhile: it has killed
  /// them, or will, and their end is no failure of theirs.
  void lapse();
  /// All workers of this host have ended. `exit_status`: what lockstep run on this host alone would return; `failure`: the
  /// report, where some failed by themselves; `culprit`: the rank on another host that is its cause, or -1.
  void workers_ended(int exit_status, const std::string& failure, BootTime now, int culprit = -1);
  /// A signal asks this agent to end; its workers have got the signal already.
  void leave(int signal, BootTime now);

  /// What is to be done with the workers now: kStart at place(), kStop (politely), or kKill. Each is told once. To be
  /// called after each of the above, and at look_again_at().
  Action advance(BootTime now);

  Phase phase() const { return phase_; }
  const Place& place() const { return started_; }
  /// The last generation that the coordinator is known to have started.
  uint64_t newest_generation() const { return newest_generation_; }
  /// The number of the last order that was carried out.
  uint64_t order() const { return self_.order; }
  /// Whether the coordinator's last order is that this host runs no workers for now.
  bool idles() const { return order_ && order_->command == Command::kIdle; }
  /// Whether the coordinator has asked a new question since the last call, which a status is to answer at once.
  bool take_question() { return std::exchange(asked_, false); }
  /// Whether some host wants this one's reports.
  bool watched() const { return order_ && order_->watched; }
  /// Whether this host wants those of all. Returns whether that is new.
  bool set_watches(bool watches) { return std::exchange(self_.watches, watches) != watches; }
  /// This agent's identity in its reports.
  const AgentId& id() const { return self_.id; }
  /// What to tell the coordinator now. Each has a later sent_at than the one before.
  Status status(BootTime now);
  BootTime look_again_at() const;
  /// Until when workers may run without a further order. Their guardian kills them then, should the agent be stopped.
  BootTime lease_until() const { return lease_until_; }
  int exit_status() const { return exit_status_; }
  /// Why it ended, or what it waits for.
  const std::string& reason() const { return reason_; }
  /// Whether that is the coordinator's word, and not this agent's own finding.
  bool reason_is_coordinators() const { return order_ && reason_ == order_->reason; }

 private:
  bool lease_valid(BootTime now) const { return now < lease_until_; }
  bool has_workers() const { return phase_ != Phase::kIdle && phase_ != Phase::kEnded; }
  bool lost_lease(BootTime now) const {
    return phase_ == Phase::kLapsed || phase_ == Phase::kKilled || !lease_valid(now);
  }
  /// The one place where the phase changes.
  void enter(Phase next);
  void end(int exit_status, const std::string& reason);

  Status self_;
  MembershipOptions options_;
  Phase phase_ = Phase::kIdle;
  BootTime born_at_;
  BootTime lease_until_;  // before the first order: in the past
  std::optional<Order> order_;
  uint64_t newest_generation_ = 0;
  Place started_;       // where the last workers were started
  BootTime tell_from_;  // with self_.leaving: what is told after this says all that matters of it
  bool asked_ = false;
  bool was_refused_ = false;
  int exit_status_ = 0;
  std::string reason_;
};

}  // namespace lockstep::launch
