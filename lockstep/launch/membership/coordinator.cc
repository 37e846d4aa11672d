#include <algorithm>
#include <map>
#include <sstream>
#include <string>
#include <utility>

#include <lockstep/launch/membership/coordinator.h>

namespace lockstep::launch {

Coordinator::Coordinator(const MembershipOptions& options, const std::array<uint8_t, 16>& job,
                         const AgentId& own, BootTime now)
    : options_(options), job_(job), own_(own) {
  world_.since = now;
}

Member* Coordinator::find(const AgentId& agent) {
  const auto found = std::find_if(members_.begin(), members_.end(),
                                  [&](const Member& member) { return member.status.id == agent; });
  return found == members_.end() ? nullptr : &*found;
}

namespace {

bool are_of_one_host(const Status& a, const Status& b) {
  return a.host == b.host && a.node_rank == b.node_rank;
}

}  // namespace

/// Gone for good, by its silence; a place in the last generation is still needed.
bool Coordinator::may_be_dropped(const Member& member, BootTime now) const {
  const auto& hosts = world_.hosts;
  return is_lost(member, options_, now) &&
         std::find(hosts.begin(), hosts.end(), member.status.id) == hosts.end();
}

/// A host mostly comes back with a new process for an agent, be it started again or the host itself. How often this one
/// has, if the newcomer takes the place of an agent that says nothing any more.
int Coordinator::losses_before(const Status& newcomer, BootTime now) const {
  int losses = 0;
  bool comes_back = false;
  for (const Member& member : members_) {
    if (!are_of_one_host(member.status, newcomer)) continue;
    losses = std::max(losses, member.losses);
    comes_back = comes_back || is_silent(member, options_, now);
  }
  return losses + (comes_back ? 1 : 0);
}

/// Those of its host, so that they do not add up. While a connection is open it may still bring an old word of theirs.
void Coordinator::drop_predecessors(const Status& newcomer, BootTime now) {
  std::erase_if(members_, [&](const Member& member) {
    return are_of_one_host(member.status, newcomer) && !member.connected && may_be_dropped(member, now);
  });
}

std::optional<Order> Coordinator::refusal_of(const Status& status) {
  std::istringstream ours(common_options(options_)), theirs(status.options);
  std::string text;
  for (std::string our, their; std::getline(ours, our);) {
    if (!std::getline(theirs, their)) their = "other options";
    if (our == their) continue;
    text += (text.empty() ? status.host + " has " : ", and ") + their + " where the coordinator has " + our;
  }
  if (text.empty()) return std::nullopt;
  text += "; give all hosts of a job the same";
  reports_.push_back(text);
  return Order{.job = job_,
               .number = world_.order,
               .status_sent_at = status.sent_at,
               .command = Command::kEnd,
               .exit_status = 1,
               .reason = text};
}

bool Coordinator::receive(const Status& status, BootTime now) {
  Member* member = find(status.id);
  if (member == nullptr) {
    const int losses = losses_before(status, now);
    drop_predecessors(status, now);
    if (members_.size() >= kMostMembers)
      std::erase_if(members_, [&](const Member& one) { return may_be_dropped(one, now); });
    if (members_.size() >= kMostMembers) return false;
    members_.push_back({.joined_at = now, .is_coordinator = status.id == own_, .losses = losses});
    member = &members_.back();
  } else if (status.sent_at <= member->status.sent_at) {
    return true;  // came twice, or was overtaken on the way by one over a newer connection
  } else if (is_lost(*member, options_, now)) {
    member->joined_at = now;
    member->resumed_at = now;
    ++member->losses;
  } else if (is_silent(*member, options_, now)) {
    member->resumed_at = now;
  }
  if (member->status.phase != status.phase || member->status.generation != status.generation)
    member->phase_since = now;
  const bool is_printed =
      member->is_coordinator || options_.one_command;  // by its own agent, where this one prints
  if (!status.failure.empty() && status.generation > member->reported && !is_printed) {
    member->reported = status.generation;
    reports_.push_back("workers on " + status.host + " have failed:\n" + status.failure);
  }
  member->status = status;
  member->heard_at = now;
  member->connected = true;
  return true;
}

void Coordinator::disconnected(const AgentId& agent) {
  if (Member* member = find(agent)) member->connected = false;
}

/// The one place where the phase changes. Each change makes new orders.
void Coordinator::enter(MembershipPhase phase, const std::string& reason, BootTime now) {
  world_.phase = phase;
  world_.since = now;
  ++world_.order;
  reason_ = reason;
  waiting_for_.clear();  // that of the phase before
}

MembershipDecision Coordinator::advance(BootTime now) {
  MembershipDecision decision = decide(world_, members_, options_, now);
  switch (decision.action) {
    case MembershipDecision::Action::kWait:
      waiting_for_ = decision.reason;
      decision.asks = decision.asks && std::exchange(question_, world_.order) != world_.order;  // once
      break;
    case MembershipDecision::Action::kStart:
      enter(MembershipPhase::kRunning, decision.reason, now);
      start(decision);
      break;
    case MembershipDecision::Action::kYield:
      enter(MembershipPhase::kYielding, decision.reason, now);
      break;
    case MembershipDecision::Action::kStop:
      enter(MembershipPhase::kForming, decision.reason, now);
      world_.after_failure = decision.counts_as_restart;
      if (decision.counts_as_restart) ++world_.restarts;
      break;
    case MembershipDecision::Action::kEnd:
      enter(MembershipPhase::kEnding, decision.reason, now);
      exit_status_ = decision.exit_status;
      break;
    case MembershipDecision::Action::kDone:
      break;
  }
  return decision;
}

void Coordinator::start(const MembershipDecision& decision) {
  world_.hosts = decision.hosts;
  ++world_.generation;
  places_.clear();
  int32_t ranks = 0;
  std::map<std::string, int32_t> ranks_of_role;  // as torchrun's _assign_worker_ranks() counts them
  for (const AgentId& agent : world_.hosts) {
    Member& member = *find(agent);
    places_.push_back({.generation = world_.generation,
                       .group_rank = static_cast<int32_t>(places_.size()),
                       .group_size = static_cast<int32_t>(world_.hosts.size()),
                       .first_rank = ranks,
                       .first_role_rank = ranks_of_role[member.status.role]});
    ranks += member.status.nproc;
    ranks_of_role[member.status.role] += member.status.nproc;
    member.run_order = world_.order;
    member.last_place = places_.back().group_rank;
  }
  for (Place& place : places_) {
    place.world_size = ranks;
    place.role_world_size =
        ranks_of_role[find(world_.hosts[static_cast<size_t>(place.group_rank)])->status.role];
  }
}

bool Coordinator::watched() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](const Member& one) { return one.connected && one.status.watches; });
}

Order Coordinator::order_for(const AgentId& agent) const {
  const Member* member = find(agent);
  Order order = {.job = job_, .number = world_.order, .generation = world_.generation, .reason = reason_};
  if (member != nullptr) order.status_sent_at = member->status.sent_at;
  order.question = question_;
  order.watched = watched();
  if (world_.phase == MembershipPhase::kEnding) {
    order.command = Command::kEnd;
    order.exit_status = exit_status_;
    return order;
  }
  const auto host = std::find(world_.hosts.begin(), world_.hosts.end(), agent);
  const bool belongs = host != world_.hosts.end();
  if (world_.phase == MembershipPhase::kForming) {
    order.reason = reason_ + (reason_.empty() || waiting_for_.empty() ? "" : "; ") + waiting_for_;
  } else if (belongs) {
    order.command = world_.phase == MembershipPhase::kRunning ? Command::kRun : Command::kYield;
    order.place = places_[static_cast<size_t>(host - world_.hosts.begin())];
  }
  if (world_.phase == MembershipPhase::kRunning && !waiting_for_.empty()) order.reason = waiting_for_;
  if (world_.phase == MembershipPhase::kRunning && !belongs) order.reason += why_not_taken(member);
  return order;
}

/// Says why the member has no place in the generation that runs. Null stands for one of which nothing is known.
std::string Coordinator::why_not_taken(const Member* member) const {
  const bool is_full = world_.hosts.size() >= static_cast<size_t>(options_.max_hosts);
  std::string why = is_full ? ", and --nnodes allows no more" : "";
  for (const AgentId& host : world_.hosts) {
    const Member* other = find(host);
    if (member == nullptr || other == nullptr) continue;
    if (!other->connected && are_of_one_host(other->status, member->status))
      return ", and this host's former agent has its place until it counts as lost";
    if (member->status.node_rank >= 0 && other->status.node_rank == member->status.node_rank)
      why = ", and another host has --node-rank " + std::to_string(member->status.node_rank);
  }
  return why;
}

}  // namespace lockstep::launch
