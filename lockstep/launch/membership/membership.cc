#include <algorithm>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>

#include <lockstep/base/deadline.h>
#include <lockstep/base/text/counted.h>
#include <lockstep/base/try_again.h>
#include <lockstep/launch/membership/membership.h>

namespace lockstep::launch {
namespace {

using Action = MembershipDecision::Action;
using Members = std::vector<Member>;
using Pointers = std::vector<const Member*>;
using std::chrono::nanoseconds;

std::string name_of(const Member& member) {
  const int rank = member.status.node_rank;
  return member.status.host + (rank >= 0 ? " (node rank " + std::to_string(rank) + ")" : "");
}

std::string names_of(const Pointers& members) {
  constexpr size_t kMost = 8;
  std::string text;
  for (size_t i = 0; i < members.size() && i < kMost; ++i)
    text += (i == 0 ? "" : ", ") + name_of(*members[i]);
  if (members.size() > kMost) text += " and " + std::to_string(members.size() - kMost) + " more";
  return text;
}

/// "1 host of 2 is" or "2 hosts of at least 3 are", with these verbs.
std::string hosts_of(size_t count, const std::string& all, const char* verb_of_one,
                     const char* verb_of_several) {
  return counted(count, "host") + " of " + all + " " + (count == 1 ? verb_of_one : verb_of_several);
}

std::string seconds_text(nanoseconds duration) {
  return std::to_string(std::chrono::round<std::chrono::seconds>(duration).count()) + " s";
}

bool belongs(const MembershipState& world, const Member& member) {
  return std::find(world.hosts.begin(), world.hosts.end(), member.status.id) != world.hosts.end();
}

Pointers select(const Members& members, auto condition) {
  Pointers chosen;
  for (const Member& member : members) {
    if (condition(member)) chosen.push_back(&member);
  }
  return chosen;
}

/// One decision in the making: what decide() was given, and what several of its steps ask for.
class Judgement {
 public:
  Judgement(const MembershipState& world, const Members& members, const MembershipOptions& options,
            BootTime now)
      : world_(world), members_(members), options_(options), now_(now) {
    hosts_ = select(members, [&](const Member& member) { return belongs(world, member); });
    ready_ = select(members, [&](const Member& member) {
      return !is_silent(member, options, now) && has_stopped(member) && member.status.leaving == 0;
    });
    // The coordinator first, then who was there, then who came first: where there are more than wanted, and
    // among two of one node rank.
    std::stable_sort(ready_.begin(), ready_.end(), [&](const Member* a, const Member* b) {
      const auto key = [&](const Member* member) {
        return std::tuple(!member->is_coordinator, !belongs(world_, *member), member->joined_at);
      };
      return key(a) < key(b);
    });
    std::set<int32_t> taken;
    const auto repeats = [&](const Member* member) {
      return member->status.node_rank >= 0 && !taken.insert(member->status.node_rank).second;
    };
    const auto repeated = std::stable_partition(ready_.begin(), ready_.end(),
                                                [&](const Member* member) { return !repeats(member); });
    repeated_.assign(repeated, ready_.end());
    ready_.erase(repeated, ready_.end());
  }

  MembershipDecision ending() {
    const Pointers busy = select(members_, [&](const Member& member) {
      const bool told = member.status.order >= world_.order || !member.connected;
      return !lost(member) && !(has_stopped(member) && told);
    });
    if (busy.empty()) return {.action = Action::kDone, .reason = "all workers have ended"};
    return wait("the job ends when " + names_of(busy) + " has ended its workers", look_at_losses(busy));
  }

  MembershipDecision forming() {
    const Pointers busy =
        select(hosts_, [&](const Member& member) { return !lost(member) && !has_stopped(member); });
    if (!busy.empty())
      return wait("the workers of " + names_of(busy) + " have to end first", look_at_losses(busy));
    const bool coordinator_ready = std::any_of(ready_.begin(), ready_.end(),
                                               [](const Member* member) { return member->is_coordinator; });
    const size_t enough = static_cast<size_t>(options_.min_hosts);
    if (!coordinator_ready || ready_.size() < enough) return wait_for_hosts();
    const size_t count = std::min(ready_.size(), static_cast<size_t>(options_.max_hosts));
    if (world_.generation == 0 && count < static_cast<size_t>(options_.max_hosts)) {
      const BootTime last_call = reached_at(enough) + options_.last_call;
      if (now_ < last_call) {
        return wait(hosts_of(count, std::to_string(options_.max_hosts), "is", "are") +
                        " here; more may come for " + seconds_text(options_.last_call) + " after the first " +
                        std::to_string(enough),
                    last_call);
      }
    }
    if (world_.after_failure) {
      const nanoseconds pause = pause_before(world_.restarts);
      const BootTime again = world_.since + pause;
      if (now_ < again)
        return wait("the workers start again " + seconds_text(pause) + " after the failure", again);
    }
    std::vector<Member> chosen;
    for (size_t i = 0; i < count; ++i) chosen.push_back(*ready_[i]);
    return {.action = Action::kStart,
            .reason = "generation " + std::to_string(world_.generation + 1) + " starts on " +
                      counted(count, "host"),
            .hosts = assign_places(std::move(chosen))};
  }

  MembershipDecision running() {
    // Losses come before failures: the workers of a host fail because those of another have gone. Not those of a host
    // that has finished: nothing more is wanted of it, and its last status counts.
    const Pointers gone = in_world([&](const Member& member) { return lost(member) && !finished(member); });
    if (!gone.empty()) {
      return stop("no word from " + names_of(gone) + " for " + seconds_text(options_.lost_after) +
                  (enough_stay() ? "; the others go on without"
                                 : "; too few are left to go on without, and wait for " +
                                       seconds_text(options_.rejoin_timeout)));
    }
    // Not before its workers have ended: they got the signal too, and may stop all others in an orderly way.
    const Pointers leaving = in_world([&](const Member& member) {
      return member.status.leaving != 0 && has_stopped(member) && member.status.exit_status != kTryAgain &&
             !finished(member);
    });
    if (!leaving.empty()) return without(leaving);
    const Pointers broken = in_world([&](const Member& member) {
      return has_stopped(member) &&
             (member.status.phase == HostPhase::kIdle || member.status.generation != world_.generation);
    });
    if (!broken.empty()) {
      return stop(names_of(broken) + " ended its workers, for it had no word from the coordinator in time");
    }
    const Pointers failed = in_world([&](const Member& member) { return ended(member, HostPhase::kFailed); });
    if (!failed.empty()) return failure(failed);
    const Pointers busy = in_world([&](const Member& member) { return !finished(member); });
    const size_t done = hosts_.size() - busy.size();
    if (done == world_.hosts.size()) return end(0, "all workers have ended with status 0");
    if (done > 0) {
      return wait(hosts_of(done, std::to_string(hosts_.size()), "has", "have") + " finished",
                  look_at_losses(busy));
    }
    return late_hosts();
  }

 private:
  bool lost(const Member& member) const { return is_lost(member, options_, now_); }
  /// Whether a generation can follow without those that are lost or leave.
  bool enough_stay() const {
    const Pointers staying = select(members_, [&](const Member& member) {
      return member.connected && !lost(member) && member.status.leaving == 0;
    });
    return staying.size() >= static_cast<size_t>(options_.min_hosts);
  }
  /// What has not heard of this generation yet still tells of a former one.
  bool ended(const Member& member, HostPhase phase) const {
    return member.status.phase == phase && member.status.generation == world_.generation;
  }
  bool finished(const Member& member) const { return ended(member, HostPhase::kFinished); }
  /// What happened to its workers may not be known yet.
  bool suspected(const Member& member) const {
    return is_silent(member, options_, now_) || now_ < heard_out_at(member) ||
           (member.status.leaving != 0 && !has_stopped(member));
  }
  /// After a silence what was said in it comes first, and then the present state.
  BootTime heard_out_at(const Member& member) const {
    return member.resumed_at + options_.heartbeat_interval * 5 / 2;
  }
  Pointers select(const Pointers& among, auto condition) const {
    Pointers chosen;
    std::copy_if(among.begin(), among.end(), std::back_inserter(chosen),
                 [&](const Member* member) { return condition(*member); });
    return chosen;
  }
  static Pointers select(const Members& among, auto condition) { return launch::select(among, condition); }
  Pointers in_world(auto condition) const { return select(hosts_, condition); }

  static MembershipDecision wait(std::string reason, BootTime look_again_at) {
    return {.action = Action::kWait, .reason = std::move(reason), .look_again_at = look_again_at};
  }
  static MembershipDecision stop(std::string reason) {
    return {.action = Action::kStop, .reason = std::move(reason)};
  }
  static MembershipDecision end(int status, std::string reason) {
    return {.action = Action::kEnd, .reason = std::move(reason), .exit_status = status};
  }

  /// When the first of these would count as lost, or no longer as suspected.
  BootTime look_at_losses(const Pointers& members) const {
    BootTime first = BootTime::max();
    for (const Member* member : members) {
      first = std::min(first, member->heard_at + options_.lost_after);
      if (now_ < heard_out_at(*member)) first = std::min(first, heard_out_at(*member));
    }
    return first;
  }

  /// When there were so many that are still there.
  BootTime reached_at(size_t count) const {
    std::vector<BootTime> joined;
    for (const Member* member : ready_) joined.push_back(member->joined_at);
    std::sort(joined.begin(), joined.end());
    return joined.at(count - 1);
  }

  static nanoseconds pause_before(int restart) {
    constexpr std::chrono::seconds kLongest(30);
    if (restart <= 1) return nanoseconds(0);
    return std::min<nanoseconds>(kLongest, std::chrono::seconds(1LL << std::min(restart - 2, 10)));
  }

  /// The --node-rank of those that are not there, where each has to have one.
  std::string missing() const {
    constexpr size_t kMost = 8;
    std::set<int32_t> here;
    for (const Member* member : ready_) here.insert(member->status.node_rank);
    if (options_.min_hosts != options_.max_hosts || here.empty() || *here.begin() < 0) return "";
    std::string text;
    size_t count = 0;
    for (int32_t rank = 0; rank < options_.max_hosts; ++rank) {
      if (here.count(rank) != 0 || ++count > kMost) continue;
      text += (text.empty() ? "; missing: node rank " : ", ") + std::to_string(rank);
    }
    return text + (count > kMost ? " and " + std::to_string(count - kMost) + " more" : "");
  }

  MembershipDecision wait_for_hosts() const {
    const bool first = world_.generation == 0;
    const nanoseconds limit = first ? options_.join_timeout : options_.rejoin_timeout;
    std::string text =
        hosts_of(ready_.size(), "at least " + std::to_string(options_.min_hosts), "is", "are") +
        (ready_.empty() ? " here" : " here: " + names_of(ready_)) + missing();
    if (!repeated_.empty())
      text += "; not " + names_of(repeated_) + ", for another host has that --node-rank";
    // The workers of the last generation may have ended, or a host have been lost, long after the order to stop.
    BootTime since = world_.since;
    for (const Member* member : hosts_) {
      const bool is_missing = lost(*member) && member->status.leaving == 0;
      since = std::max(since, is_missing ? member->heard_at + options_.lost_after : member->phase_since);
    }
    const BootTime until = since + limit;
    if (now_ < until) return wait(text, until);
    return end(
        1, text + ", " + seconds_text(limit) +
               (first ? " after the start (join_timeout)" : " after the others were lost (rejoin_timeout)") +
               ": the job ends");
  }

  /// On which host this rank of the last generation was.
  const Member* host_of(int rank) const {
    int ranks = 0;
    for (const AgentId& agent : world_.hosts) {
      const auto host = std::find_if(hosts_.begin(), hosts_.end(),
                                     [&](const Member* member) { return member->status.id == agent; });
      if (host == hosts_.end()) return nullptr;
      ranks += (*host)->status.nproc;
      if (rank < ranks) return *host;
    }
    return nullptr;
  }

  /// Where it is on a host that has not said so itself.
  std::string cause_of(const Pointers& failed) const {
    for (const Member* member : failed) {
      const int rank = member->status.culprit;
      const Member* host = rank < 0 ? nullptr : host_of(rank);
      if (host == nullptr || std::find(failed.begin(), failed.end(), host) != failed.end()) continue;
      return " because of rank " + std::to_string(rank) + " on " + name_of(*host) + ", as their errors say";
    }
    return "";
  }

  /// Names the hosts whose workers were the first to fail, for the others' failures follow from theirs.
  std::string cause_among(const Pointers& failed) const {
    const auto is_failure = [](const Member& member) { return member.status.exit_status != kTryAgain; };
    const Pointers failures = select(failed, is_failure);
    BootTime first = BootTime::max();
    for (const Member* member : failures) first = std::min(first, member->phase_since);
    const Pointers earliest = failures.empty() ? failed : select(failures, [&](const Member& member) {
      return member.phase_since == first;
    });
    return "workers on " + names_of(earliest) + " have failed" + cause_of(earliest);
  }

  /// A signal has asked these to end.
  MembershipDecision without(const Pointers& leaving) const {
    const int signal = leaving.front()->status.leaving;
    const std::string what = names_of(leaving) + " was asked to end by signal " + std::to_string(signal);
    if (enough_stay()) return stop(what + "; the others go on without");
    return end(128 + signal, what + ", and too few hosts are left");
  }

  MembershipDecision failure(const Pointers& failed) const {
    const bool yielding = world_.phase == MembershipPhase::kYielding;
    const Pointers try_again =
        select(failed, [](const Member& member) { return member.status.exit_status == kTryAgain; });
    BootTime first = BootTime::max();
    for (const Member* member : failed) first = std::min(first, member->phase_since);
    const std::string what =
        yielding ? "workers on " + names_of(try_again) + " ask to be started again, and not all others do"
                 : cause_among(failed);
    // A host that answers what was asked after the failure was not lost before. Any other status proves nothing: it may have
    // been on its way for long, and its host be lost since.
    const Pointers silent = in_world([&](const Member& member) {
      const bool has_failed = std::find(failed.begin(), failed.end(), &member) != failed.end();
      const bool has_answered = member.status.answers >= world_.order;
      return !finished(member) && (suspected(member) || (!has_failed && !has_answered));
    });
    if (!silent.empty()) {
      MembershipDecision decision =
          wait(what + "; the end of " + names_of(silent) + " may be the cause", look_at_losses(silent));
      decision.asks = true;
      return decision;
    }
    const bool all_ask = try_again.size() == failed.size();
    if (all_ask && failed.size() == world_.hosts.size())
      return end(kTryAgain, "all workers ask to be started again");
    const Pointers awaited = in_world(
        [&](const Member& member) { return !ended(member, HostPhase::kFailed) && !finished(member); });
    const std::string asks =
        "workers on " + names_of(try_again) + " have stopped and ask to be started again";
    const BootTime loss = look_at_losses(in_world([&](const Member& member) { return !finished(member); }));
    // As on one host: the others notice it by themselves, say so and stop, or get a signal.
    const BootTime react_until = first + options_.reaction_time;
    if (!awaited.empty() && !yielding && now_ < react_until)
      return wait((all_ask ? asks : what) + "; the others are awaited", std::min(loss, react_until));
    // A RobustLoop answers it with the same status.
    if (!awaited.empty() && !yielding && all_ask) {
      return {.action = Action::kYield,
              .reason = asks + "; those on " + names_of(awaited) + " are asked to stop, too"};
    }
    if (!awaited.empty() && all_ask) return wait(asks + "; the others are awaited", loss);
    const Pointers leaving =
        select(try_again, [](const Member& member) { return member.status.leaving != 0; });
    // Where the host that a signal asked to end was the first to do so, the others have failed because of it.
    const bool left_first = std::any_of(leaving.begin(), leaving.end(),
                                        [&](const Member* member) { return member->phase_since == first; });
    if (left_first || (yielding && !leaving.empty())) return without(leaving);
    if (world_.restarts >= options_.max_restarts) {
      return end(1, what + (options_.max_restarts == 0 ? "" : ", and all restarts are used up"));
    }
    MembershipDecision decision = stop(what + "; restart " + std::to_string(world_.restarts + 1) + " of " +
                                       std::to_string(options_.max_restarts));
    decision.counts_as_restart = true;
    return decision;
  }

  MembershipDecision late_hosts() const {
    const BootTime next_loss = look_at_losses(hosts_);
    const std::string runs =
        "generation " + std::to_string(world_.generation) + " runs on " + counted(hosts_.size(), "host");
    if (world_.hosts.size() >= static_cast<size_t>(options_.max_hosts)) return wait(runs, next_loss);
    // None while one of the world is silent: its loss would end a second generation right after the first.
    if (!in_world([&](const Member& member) { return suspected(member); }).empty())
      return wait(runs, next_loss);
    BootTime settled = BootTime::max();
    Pointers late;
    for (const Member* member : ready_) {
      if (belongs(world_, *member)) continue;
      late.push_back(member);
      // Longer with each loss: a host that comes and goes must not stop the others each time.
      settled = std::min(settled, member->joined_at + options_.settling * (1 << std::min(member->losses, 8)));
    }
    if (late.empty()) return wait(runs, next_loss);
    if (now_ < settled)
      return wait(runs + "; " + names_of(late) + " may join soon", std::min(settled, next_loss));
    return stop(names_of(late) + (late.size() == 1 ? " joins" : " join"));
  }

  const MembershipState& world_;
  const Members& members_;
  const MembershipOptions& options_;
  BootTime now_;
  Pointers hosts_;     // of the last generation, as far as they are known
  Pointers ready_;     // could run the next one
  Pointers repeated_;  // could, but another has their node rank
};

}  // namespace

std::optional<std::string> objection_to(const MembershipOptions& options) {
  if (options.min_hosts < 1)
    return "the least number of hosts is " + std::to_string(options.min_hosts) + "; it must be 1 or more";
  if (options.max_hosts < options.min_hosts) {
    return "the greatest number of hosts, " + std::to_string(options.max_hosts) + ", is below the least, " +
           std::to_string(options.min_hosts);
  }
  if (options.max_restarts < 0) return "the number of restarts is negative";
  // The coordinator cuts off an agent that sends 200 messages a second.
  if (options.heartbeat_interval < std::chrono::milliseconds(10))
    return "the heartbeat interval must be 0.01 s or more";
  if (options.lease < options.heartbeat_interval * 3) {
    return "the lease must be three heartbeat intervals or more, for one may be late";
  }
  if (options.lost_after < options.lease * 23 / 20 + std::chrono::milliseconds(500)) {
    return "hosts count as lost after " + seconds_text(options.lost_after) +
           ", and that must be 15 % and half a second more than the lease of " + seconds_text(options.lease);
  }
  return std::nullopt;
}

std::string common_options(const MembershipOptions& options) {
  std::ostringstream text;
  text << "--nnodes=" << options.min_hosts;
  if (options.max_hosts != options.min_hosts) text << ':' << options.max_hosts;
  text << "\n--max-restarts=" << options.max_restarts
       << "\n--rdzv-conf=keep_alive_interval=" << to_seconds(options.heartbeat_interval)
       << "\n--rdzv-conf=lease=" << to_seconds(options.lease) << '\n';
  return text.str();
}

bool is_lost(const Member& member, const MembershipOptions& options, BootTime now) {
  return now - member.heard_at >= options.lost_after;
}

bool is_silent(const Member& member, const MembershipOptions& options, BootTime now) {
  return !member.connected || now - member.heard_at > options.heartbeat_interval * 5 / 2;
}

bool has_stopped(const Member& member) {
  return member.status.phase != HostPhase::kRunning && member.status.order >= member.run_order;
}

MembershipDecision decide(const MembershipState& world, const Members& members,
                          const MembershipOptions& options, BootTime now) {
  Judgement judgement(world, members, options, now);
  if (world.phase == MembershipPhase::kEnding) return judgement.ending();
  for (const Member& member : members) {
    const bool asks_again =
        world.phase != MembershipPhase::kForming && member.status.exit_status == kTryAgain;
    if (member.is_coordinator && member.status.leaving != 0 && has_stopped(member) && !asks_again) {
      return {.action = Action::kEnd,
              .reason = "the coordinator, " + name_of(member) + ", was asked to end by signal " +
                        std::to_string(member.status.leaving),
              .exit_status = 128 + member.status.leaving};
    }
  }
  return world.phase == MembershipPhase::kForming ? judgement.forming() : judgement.running();
}

std::vector<AgentId> assign_places(std::vector<Member> chosen) {
  const auto wish_of = [](const Member& member) {
    return member.status.node_rank >= 0 ? member.status.node_rank : member.last_place;
  };
  // Where two were at one place at different times, the later one has the better claim.
  std::stable_sort(chosen.begin(), chosen.end(), [&](const Member& a, const Member& b) {
    const auto key = [](const Member& member) {
      return std::tuple(member.status.node_rank < 0, ~member.status.generation, !member.is_coordinator,
                        member.joined_at);
    };
    return key(a) < key(b);
  });
  std::vector<AgentId> places(chosen.size());
  std::vector<bool> taken(chosen.size());
  std::vector<const Member*> rest;
  for (const Member& member : chosen) {
    const auto wish = static_cast<size_t>(wish_of(member));
    if (wish_of(member) >= 0 && wish < places.size() && !taken[wish]) {
      places[wish] = member.status.id;
      taken[wish] = true;
    } else {
      rest.push_back(&member);
    }
  }
  size_t place = 0;
  for (const Member* member : rest) {
    while (taken[place]) ++place;
    taken[place] = true;
    places[place] = member->status.id;
  }
  return places;
}

}  // namespace lockstep::launch
