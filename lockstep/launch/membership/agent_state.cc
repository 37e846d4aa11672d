#include <algorithm>

#include <lockstep/launch/membership/agent_state.h>

namespace lockstep::launch {

AgentState::AgentState(const Status& self, const MembershipOptions& options, BootTime now)
    : self_(self), options_(options), born_at_(now), lease_until_(now) {
  self_.options = common_options(options);
}

void AgentState::enter(Phase next) {
  if (phase_ == Phase::kKilled && next == Phase::kLapsed) return;  // not a second time
  phase_ = next;
}

void AgentState::end(int exit_status, const std::string& reason) {
  exit_status_ = exit_status;
  reason_ = reason;
  enter(Phase::kEnded);
}

void AgentState::receive(const Order& order, BootTime now) {
  if (order_ && order_->job != order.job) {
    // Another process coordinates at that address: the world that this host's workers belong to has ended.
    was_refused_ = true;
    lease_until_ = std::min(lease_until_, now);
    return;
  }
  was_refused_ = false;
  if (order.question > self_.answers) {
    self_.answers = order.question;
    asked_ = true;
  }
  // The answer to a status, which the coordinator got later than it was sent: so it counts this host as alive for
  // longer than the lease lasts.
  if (!lease_valid(now)) lapse();
  const BootTime sent_at{BootClock::duration(order.status_sent_at)};
  lease_until_ = std::max(lease_until_, std::min(sent_at, now) + options_.lease);
  newest_generation_ = std::max(newest_generation_, order.generation);
  if (order_ && order.number < order_->number) return;
  order_ = order;
}

void AgentState::refused(BootTime) {
  was_refused_ = true;
}

void AgentState::lapse() {
  if (has_workers()) enter(Phase::kLapsed);
}

void AgentState::workers_ended(int exit_status, const std::string& failure, BootTime now, int culprit) {
  const bool killed = lost_lease(now);
  const bool by_themselves = (phase_ == Phase::kRunning || phase_ == Phase::kYielding) && !killed;
  self_.phase = !by_themselves     ? HostPhase::kIdle
                : exit_status == 0 ? HostPhase::kFinished
                                   : HostPhase::kFailed;
  self_.exit_status = by_themselves ? exit_status : 0;
  // Also of those that failed before the order to stop came, for it may be the cause of what other hosts have told.
  self_.failure = killed ? std::string() : failure;
  self_.culprit = killed ? -1 : culprit;
  if (self_.leaving != 0) tell_from_ = now;
  enter(Phase::kIdle);
}

void AgentState::leave(int signal, BootTime now) {
  if (self_.leaving != 0) return;
  self_.leaving = signal;
  tell_from_ = now;
}

AgentState::Action AgentState::advance(BootTime now) {
  if (phase_ == Phase::kEnded) {
    if (order_) self_.order = order_->number;  // of the coordinator's host: it waits to be told so
    return Action::kNothing;
  }
  if (!has_workers()) {
    if (order_ && order_->command == Command::kEnd) {
      self_.order = order_->number;
      end(order_->exit_status, order_->reason);
    } else if (order_ && order_->command == Command::kRun && order_->place.generation > started_.generation &&
               lease_valid(now) && self_.leaving == 0) {
      started_ = order_->place;
      self_.order = order_->number;
      self_.generation = started_.generation;
      self_.phase = HostPhase::kRunning;
      self_.failure.clear();
      self_.culprit = -1;
      self_.exit_status = 0;
      enter(Phase::kRunning);
      return Action::kStart;
    } else if ((was_refused_ || !lease_valid(now)) && self_.leaving != 0) {
      end(128 + self_.leaving, "ended by a signal");  // no coordinator listens
    } else if (!lease_valid(now)) {
      const auto silence = now - (order_ ? lease_until_ : born_at_);
      if (order_ && was_refused_) {
        end(1, "the coordinator has ended, and with it the job");
      } else if (silence >= (order_ ? options_.rejoin_timeout : options_.join_timeout)) {
        end(1, order_ ? "the coordinator was lost: no word from it; its host or the network to it is down"
                      : "no coordinator answered in time");
      }
    } else if (order_) {
      self_.order = order_->number;
      reason_ = order_->reason;
      // Once the coordinator knows, and counts no longer on this host: where the job ends with it, it says so first.
      // The others need nothing more of one whose workers have all finished.
      const bool told = BootTime(BootClock::duration(order_->status_sent_at)) > tell_from_;
      const bool has_finished =
          self_.phase == HostPhase::kFinished && order_->place.generation == started_.generation;
      const bool dispensable = order_->command == Command::kIdle || has_finished;
      if (self_.leaving != 0 && told && dispensable)
        end(has_finished && options_.one_command ? 0 : 128 + self_.leaving, "ended by a signal");
    }
    return Action::kNothing;
  }
  const bool present = order_->place.generation == started_.generation;
  const bool yields = present && order_->command == Command::kYield;
  const bool wanted = present && order_->command == Command::kRun;
  if (phase_ == Phase::kKilled) return Action::kNothing;
  if (lost_lease(now)) {
    enter(Phase::kKilled);
    reason_ = "no word from the coordinator";
    return Action::kKill;
  }
  if (phase_ == Phase::kRunning && !wanted) {
    enter(yields ? Phase::kYielding : Phase::kStopping);
    reason_ = order_->reason;
    return Action::kStop;
  }
  if (phase_ == Phase::kYielding && !yields) enter(Phase::kStopping);
  return Action::kNothing;
}

Status AgentState::status(BootTime now) {
  self_.sent_at = std::max(self_.sent_at + 1, static_cast<int64_t>(now.time_since_epoch().count()));
  return self_;
}

BootTime AgentState::look_again_at() const {
  if (phase_ == Phase::kEnded) return BootTime::max();
  if (has_workers()) return phase_ == Phase::kKilled ? BootTime::max() : lease_until_;
  return order_ ? lease_until_ + (was_refused_ ? std::chrono::nanoseconds(0) : options_.rejoin_timeout)
                : born_at_ + options_.join_timeout;
}

}  // namespace lockstep::launch
