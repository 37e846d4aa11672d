#include <algorithm>
#include <array>

#include <lockstep/launch/membership/testing/simulation.h>

namespace lockstep::launch::simulation {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTick(50);
constexpr milliseconds kKillTime(300);  // from SIGKILL to a worker's end, at most

}  // namespace

Simulation::Simulation(const Scene& scene, uint64_t seed)
    : scene_(scene), random_(seed), hosts_(static_cast<size_t>(scene.hosts)) {
  for (Host& host : hosts_) {
    host.clock_rate = 0.96 + 0.08 * unit();
    host.clock_offset = seconds(static_cast<int>(unit() * 1e6));
  }
  start_agent(0);
  coordinator_ = std::make_unique<Coordinator>(scene.options, std::array<uint8_t, 16>{7}, id_of(0),
                                               hosts_[0].clock(now_));
  hosts_[0].immune = true;
  for (int i = 1; i < scene.hosts; ++i) {
    hosts_[static_cast<size_t>(i)].immune = scene.harmless_only && i < scene.options.min_hosts;
    if (hosts_[static_cast<size_t>(i)].immune || chance(0.7)) start_agent(i);
  }
}

bool Simulation::run() {
  const TrueTime chaos_end = scene_.chaos;
  const TrueTime dies_at =
      scene_.coordinator_dies
          ? TrueTime(static_cast<int64_t>(unit() * static_cast<double>(chaos_end.count())))
          : TrueTime::max();
  while (now_ < chaos_end && !over() && problem_.empty()) {
    tick();
    cause_trouble();
    if (now_ >= dies_at && coordinator_) kill_coordinator();
  }
  heal();
  const TrueTime calm_end =
      now_ + (coordinator_ ? scene_.calm : 2 * scene_.options.rejoin_timeout + scene_.options.join_timeout);
  while (now_ < calm_end && !over() && problem_.empty()) {
    tick();
    if (coordinator_ && coordinator_->world().phase != MembershipPhase::kEnding)
      start_missing_agents();  // some have been asked to end
  }
  check_end();
  return problem_.empty();
}

AgentId Simulation::id_of(int host) const {
  AgentId id = {};
  id[0] = static_cast<uint8_t>(host);
  id[1] = static_cast<uint8_t>(lives_.count(host) ? lives_.at(host) : 0);
  return id;
}

void Simulation::start_agent(int index) {
  Host& host = hosts_[static_cast<size_t>(index)];
  ++lives_[index];
  host.agent = std::make_unique<AgentState>(
      Status{.id = id_of(index), .host = "node-" + std::to_string(index), .nproc = 1 + index % 3},
      scene_.options, host.clock(now_));
  host.next_heartbeat = now_;
}

void Simulation::send(const AgentId& agent, std::optional<Status> status, std::optional<Order> order) {
  if (scene_.harmless_only) {
    TrueTime& arrives_at = last_arrival_[{agent[0], status.has_value()}];
    arrives_at = std::max(arrives_at, now_ + up_to(milliseconds(200)));
    messages_.push_back({arrives_at, agent, status, order});
    return;
  }
  const nanoseconds most = chance(0.02) ? nanoseconds(seconds(15)) : milliseconds(200);
  for (int copies = chance(0.02) ? 2 : 1; copies > 0; --copies) {
    messages_.push_back({now_ + up_to(most), agent, status, order});
  }
}

void Simulation::tick() {
  now_ += kTick;
  deliver();
  coordinate();
  for (int i = 0; i < scene_.hosts; ++i) step_host(i);
  if (scene_.finished_hosts_go) lose_finished_hosts();
  check();
}

void Simulation::lose_finished_hosts() {
  const MembershipState& world = coordinator_->world();
  for (const Member& member : coordinator_->members()) {
    const int index = member.status.id[0];
    const bool has_finished = world.phase == MembershipPhase::kRunning &&
                              member.status.phase == HostPhase::kFinished &&
                              member.status.generation == world.generation;
    Host& host = hosts_[static_cast<size_t>(index)];
    if (!has_finished || index == 0 || !host.agent || !gone_.insert(member.status.id).second) continue;
    switch (random_() % 3) {
      case 0:
        host.agent.reset();
        break;
      case 1:
        host.cut_until = now_ + seconds(100);
        break;
      default:
        host.agent->leave(15, host.clock(now_));
    }
  }
}

void Simulation::deliver() {
  std::vector<Message> later;
  std::vector<Message> due;
  for (Message& message : messages_) (message.arrives_at <= now_ ? due : later).push_back(std::move(message));
  messages_ = std::move(later);
  for (Message& message : due) {
    Host& host = hosts_[message.agent[0]];
    if (!linked(message.agent[0])) {
      if (scene_.harmless_only || chance(0.5))
        messages_.push_back({host.cut_until + (scene_.harmless_only ? nanoseconds(0) : up_to(seconds(1))),
                             message.agent, message.status, message.order});
      continue;  // or it is lost
    }
    if (message.status) {
      if (!coordinator_) continue;
      if (!running(hosts_[0])) {
        messages_.push_back(message);
        messages_.back().arrives_at = hosts_[0].suspended_until;
        continue;
      }
      coordinator_->receive(*message.status, hosts_[0].clock(now_));
      send(message.agent, {}, coordinator_->order_for(message.status->id));
      look_again_at_ = BootTime::min();
    } else if (message.agent != id_of(message.agent[0])) {
      continue;  // that agent was killed
    } else if (agent_runs(host)) {
      host.agent->receive(*message.order, host.clock(now_));
    } else if (host.agent) {
      messages_.push_back(message);
      messages_.back().arrives_at = std::max(host.suspended_until, host.agent_stopped_until);
    }
  }
}

void Simulation::coordinate() {
  if (!coordinator_ || !running(hosts_[0])) return;
  const BootTime clock = hosts_[0].clock(now_);
  if (clock < look_again_at_) return;
  while (true) {
    const MembershipDecision decision = coordinator_->advance(clock);
    if (decision.reason.empty()) fail("a decision without a reason");
    look_again_at_ = decision.look_again_at;
    if (decision.action == MembershipDecision::Action::kStart) note_start(decision);
    if (decision.action == MembershipDecision::Action::kDone) {
      coordinator_exit_ = coordinator_->exit_status();
      done_ = true;
    }
    const bool waits = decision.action == MembershipDecision::Action::kWait || done_;
    for (const Member& member : coordinator_->members()) {
      if (waits && !decision.asks) break;
      send(member.status.id, {}, coordinator_->order_for(member.status.id));
    }
    if (waits) break;
  }
}

void Simulation::note_start(const MembershipDecision& decision) {
  const uint64_t generation = coordinator_->world().generation;
  places_[generation] = decision.hosts;
  if (!gone_.empty()) fail("hosts that have finished stop the others");
  const auto size = static_cast<int>(decision.hosts.size());
  if (size < scene_.options.min_hosts || size > scene_.options.max_hosts)
    fail("a world of " + std::to_string(size));
  if (std::find(decision.hosts.begin(), decision.hosts.end(), id_of(0)) == decision.hosts.end()) {
    fail("a world without the coordinator's host");
  }
  int32_t first = 0;
  for (int32_t rank = 0; rank < size; ++rank) {
    const Order order = coordinator_->order_for(decision.hosts[static_cast<size_t>(rank)]);
    if (order.place.group_rank != rank || order.place.group_size != size || order.place.first_rank != first) {
      fail("ranks of a host that are not neighbours");
    }
    first += 1 + decision.hosts[static_cast<size_t>(rank)][0] % 3;
  }
}

void Simulation::step_host(int index) {
  Host& host = hosts_[static_cast<size_t>(index)];
  if (!running(host)) return;
  const BootTime clock = host.clock(now_);
  if (host.workers && clock >= host.guardian_until) end_workers_by(host, now_ + up_to(kKillTime), 137);
  if (host.workers && now_ >= host.end_at) {
    host.workers = false;
    host.was_suspended = false;
    host.end_at = TrueTime::max();
    if (host.agent) ended_[index] = host.end_status;
  }
  if (!agent_runs(host)) return;
  if (host.workers || ended_.count(index) != 0) {
    if (clock >= host.guardian_until) host.agent->lapse();
  }
  if (ended_.count(index) != 0) {
    host.agent->workers_ended(ended_[index], "report", clock);
    ended_.erase(index);
  }
  if (!coordinator_ && linked(index) && chance(0.2)) host.agent->refused(clock);
  switch (host.agent->advance(clock)) {
    case AgentState::Action::kNothing:
      break;
    case AgentState::Action::kStart:
      if (host.workers) return fail("workers are started beside others");
      host.workers = true;
      host.place = host.agent->place();
      host.guardian_until = host.agent->lease_until();
      host.end_at = TrueTime::max();
      break;
    case AgentState::Action::kStop:
      end_workers_by(host, now_ + up_to(kStopTime),
                     scene_.one_asks_again && chance(scene_.asks_again) ? 75 : 143);
      break;
    case AgentState::Action::kKill:
      end_workers_by(host, now_ + up_to(kKillTime), 137);
      break;
  }
  if (now_ >= host.next_renewal || clock >= host.guardian_until) {
    host.guardian_until = host.agent->lease_until();
    host.next_renewal = now_ + milliseconds(500);
  }
  if (host.agent->phase() == AgentState::Phase::kEnded) {
    if (host.workers) fail("an agent ends before its workers");
    agent_exits_[index] = host.agent->exit_status();
    send(id_of(index), host.agent->status(clock), {});
    host.agent.reset();
    return;
  }
  Status status = host.agent->status(clock);
  const std::string told = std::to_string(static_cast<int>(status.phase)) + "/" +
                           std::to_string(status.order) + "/" + std::to_string(status.leaving);
  if (host.agent->take_question() || now_ >= host.next_heartbeat || told != host.last_status) {
    host.next_heartbeat = now_ + scene_.options.heartbeat_interval;
    host.last_status = told;
    send(id_of(index), status, {});
  }
}

void Simulation::end_workers_by(Host& host, TrueTime at, int status) {
  if (!host.workers || at >= host.end_at) return;
  host.end_at = at;
  host.end_status = status;
}

bool Simulation::complete(uint64_t generation) const {
  const auto found = places_.find(generation);
  return found != places_.end() &&
         std::all_of(found->second.begin(), found->second.end(), [&](const AgentId& id) {
           const Host& host = hosts_[id[0]];
           return host.workers && host.place.generation == generation;
         });
}

void Simulation::check() {
  std::map<uint64_t, int> awake;  // generations with workers on hosts that were never suspended meanwhile
  std::vector<uint64_t> whole;
  for (const Host& host : hosts_) {
    if (host.workers && !host.was_suspended) ++awake[host.place.generation];
  }
  for (const auto& [generation, hosts] : places_) {
    if (complete(generation)) whole.push_back(generation);
  }
  if (awake.size() > 1) fail("workers of two generations run");
  if (whole.size() > 1) fail("two complete worlds run");
  if (whole.size() == 1 && hosts_[0].workers && hosts_[0].place.generation != whole[0])
    fail("a former world runs");
  // Workers whose peers have gone notice it, or hang.
  for (Host& host : hosts_) {
    if (now_ < scene_.work && host.workers && running(host) && started_whole_.count(host.place.generation) &&
        !complete(host.place.generation) && chance(0.005)) {
      end_workers_by(host, now_, 1);
    }
  }
  if (whole.size() == 1) {
    started_whole_[whole[0]] = true;
    if (now_ >= scene_.work) {
      const std::vector<AgentId>& world = places_.at(whole[0]);
      const Host& asking = hosts_[world[whole[0] % world.size()][0]];
      for (Host& host : hosts_) {
        if (!host.workers || host.place.generation != whole[0] || host.end_at != TrueTime::max()) continue;
        if (!scene_.one_asks_again) {
          end_workers_by(host, now_ + up_to(scene_.spread), chance(scene_.asks_again) ? 75 : 0);
        } else if (&host == &asking) {
          end_workers_by(host, now_ + up_to(scene_.spread), 75);
        }
      }
    }
  }
  if (whole.empty()) {
    if (!started_whole_.empty()) longest_outage_ = std::max(longest_outage_, now_ - last_whole_);
  } else {
    last_whole_ = now_;
  }
}

void Simulation::cause_trouble() {
  for (int i = 0; i < scene_.hosts; ++i) {
    Host& host = hosts_[static_cast<size_t>(i)];
    if (!scene_.harmless_only && host.workers && chance(0.0002)) end_workers_by(host, now_, 1);
    if (host.immune) continue;
    if (!host.agent) {
      if (chance(0.003)) start_agent(i);
      continue;
    }
    const double kind = unit();
    if (kind < 0.0005) {  // kill -9; the guardian sees to the workers
      host.agent.reset();
      ended_.erase(i);
      end_workers_by(host, now_ + up_to(kKillTime), 137);
      if (coordinator_ && linked(i)) coordinator_->disconnected(id_of(i));
      look_again_at_ = BootTime::min();
    } else if (kind < 0.0015) {
      host.cut_until = now_ + (chance(0.5) ? up_to(seconds(9)) : up_to(seconds(80)));
    } else if (kind < 0.0018) {
      host.suspended_until = now_ + up_to(seconds(40));
      host.was_suspended = host.workers;
    } else if (kind < 0.0022) {
      host.agent_stopped_until = now_ + up_to(seconds(40));
    } else if (kind < 0.0024) {
      host.agent->leave(15, host.clock(now_));
      end_workers_by(host, now_ + up_to(kStopTime), 143);
    }
  }
  if (!scene_.harmless_only && chance(0.0001)) {
    hosts_[0].suspended_until = now_ + up_to(seconds(30));
    hosts_[0].was_suspended = hosts_[0].workers;
  }
}

void Simulation::kill_coordinator() {
  coordinator_.reset();
  hosts_[0].agent.reset();
  end_workers_by(hosts_[0], now_ + up_to(kKillTime), 137);
  std::erase_if(messages_, [](const Message& message) { return message.agent[0] == 0; });
}

void Simulation::heal() {
  for (Host& host : hosts_) {
    host.cut_until = std::min(host.cut_until, now_);
    host.suspended_until = std::min(host.suspended_until, now_);
    host.agent_stopped_until = std::min(host.agent_stopped_until, now_);
  }
}

void Simulation::start_missing_agents() {
  for (int i = 1; i < scene_.hosts; ++i) {
    if (!hosts_[static_cast<size_t>(i)].agent) start_agent(i);
  }
}

bool Simulation::over() const {
  const bool agents =
      std::any_of(hosts_.begin(), hosts_.end(), [](const Host& host) { return host.agent != nullptr; });
  const bool workers =
      std::any_of(hosts_.begin(), hosts_.end(), [](const Host& host) { return host.workers; });
  return done_ || (!coordinator_ && !agents && !workers);
}

void Simulation::check_end() {
  if (!problem_.empty()) return;
  if (!coordinator_) {
    for (const Host& host : hosts_) {
      if (host.agent || host.workers) return fail("the coordinator was lost, and something runs on");
    }
    for (const auto& [host, status] : agent_exits_) {
      if (status == 0) return fail("the coordinator was lost, and an agent ended with status 0");
    }
    return;
  }
  if (done_) {
    for (const Host& host : hosts_) {
      if (host.workers && !host.was_suspended) return fail("the job has ended, and workers run on");
    }
    if (scene_.harmless_only && scene_.asks_again == 0 && !scene_.one_asks_again && coordinator_exit_ != 0)
      return fail("a job that had all it needs has ended");
    return;
  }
  if (coordinator_->world().phase == MembershipPhase::kEnding) return fail("the job does not end");
  // It may just give way to the next one, for a host that joins.
  if (now_ - last_whole_ > scene_.options.lost_after)
    return fail("no world runs, though enough hosts are there");
}

void Simulation::fail(const std::string& what) {
  if (problem_.empty())
    problem_ = what + " at " + std::to_string(std::chrono::duration<double>(now_).count()) + " s";
}

}  // namespace lockstep::launch::simulation
