// Thousands of random histories of a job on several hosts: agents that come, are killed and stopped, hosts that are
// suspended, cables that are cut and mended, messages that are late, come twice or in another order, workers that
// fail or hang, clocks that run 4 % fast or slow. The state machines are the ones that the agents run.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/launch/membership/agent_state.h>
#include <lockstep/launch/membership/coordinator.h>
#include <lockstep/testing/long_run.h>

namespace lockstep::launch::membership_simulation_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

using TrueTime = nanoseconds;  // which no host knows

constexpr milliseconds kTick(50);
constexpr milliseconds kKillTime(300);  // from SIGKILL to a worker's end, at most
constexpr seconds kStopTime(3);         // from SIGTERM, at most

struct Message {
  TrueTime arrives_at;
  AgentId agent;  // from which it comes, or to which it goes
  std::optional<Status> status;
  std::optional<Order> order;
};

struct Host {
  double clock_rate = 1;
  nanoseconds clock_offset{0};
  std::unique_ptr<AgentState> agent;  // null: there is none, or it was killed
  bool immune = false;                // nothing happens to it
  TrueTime cut_until{0};
  TrueTime suspended_until{0};      // the whole host
  TrueTime agent_stopped_until{0};  // SIGSTOP, to the agent alone
  TrueTime next_heartbeat{0};
  std::string last_status;  // as told, to tell changes at once
  // Its workers.
  Place place;  // of those that run
  bool workers = false;
  bool was_suspended = false;        // while these workers ran
  TrueTime end_at{TrueTime::max()};  // when they end
  int end_status = 0;
  BootTime guardian_until;  // the lease that the guardian knows, and when it is told next
  TrueTime next_renewal{0};

  BootTime clock(TrueTime now) const {
    return BootTime(clock_offset +
                    nanoseconds(static_cast<int64_t>(static_cast<double>(now.count()) * clock_rate)));
  }
};

struct Scene {
  int hosts = 4;
  MembershipOptions options;
  bool harmless_only = false;  // at least min_hosts are immune and no workers fail
  bool coordinator_dies = false;
  TrueTime chaos{seconds(150)};
  TrueTime work{seconds(100000)};  // until the workers of a complete world finish
  TrueTime spread{seconds(2)};     // within which they do
  double asks_again = 0;           // how often those of a host ask to be started again instead
  bool one_asks_again =
      false;  // those of one host ask at once, and others answer a signal so; otherwise they hang
  bool finished_hosts_go = false;  // hosts that have finished are lost or leave while others still work
  TrueTime calm{seconds(60)};      // in which nothing more happens, at the end
};

class Simulation {
 public:
  Simulation(const Scene& scene, uint64_t seed)
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

  /// Runs the history, and then some time in which nothing more happens. False once a property does not hold.
  bool run() {
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
      if (coordinator_ && coordinator_->world().phase != WorldPhase::kEnding)
        start_missing_agents();  // some have been asked to end
    }
    check_end();
    return problem_.empty();
  }

  const std::string& problem() const { return problem_; }
  int generations() const { return static_cast<int>(places_.size()); }
  int exit_status() const { return coordinator_exit_; }
  TrueTime longest_outage() const { return longest_outage_; }

 private:
  double unit() { return std::uniform_real_distribution<double>(0, 1)(random_); }
  bool chance(double probability) { return unit() < probability; }
  TrueTime up_to(nanoseconds most) {
    return TrueTime(static_cast<int64_t>(unit() * static_cast<double>(most.count())));
  }
  TrueTime between(nanoseconds least, nanoseconds most) { return least + up_to(most - least); }

  AgentId id_of(int host) const {
    AgentId id = {};
    id[0] = static_cast<uint8_t>(host);
    id[1] = static_cast<uint8_t>(lives_.count(host) ? lives_.at(host) : 0);
    return id;
  }

  void start_agent(int index) {
    Host& host = hosts_[static_cast<size_t>(index)];
    ++lives_[index];
    host.agent = std::make_unique<AgentState>(
        Status{.id = id_of(index), .host = "node-" + std::to_string(index), .nproc = 1 + index % 3},
        scene_.options, host.clock(now_));
    host.next_heartbeat = now_;
  }

  bool running(const Host& host) const { return now_ >= host.suspended_until; }
  bool agent_runs(const Host& host) const {
    return host.agent && running(host) && now_ >= host.agent_stopped_until;
  }
  bool linked(int index) const { return index == 0 || now_ >= hosts_[static_cast<size_t>(index)].cut_until; }

  /// In order, as one connection does; or, where the scene says so, late, twice, or overtaken, as an old connection and
  /// its successor do in the worst case.
  void send(const AgentId& agent, std::optional<Status> status, std::optional<Order> order) {
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

  void tick() {
    now_ += kTick;
    deliver();
    coordinate();
    for (int i = 0; i < scene_.hosts; ++i) step_host(i);
    if (scene_.finished_hosts_go) lose_finished_hosts();
    check();
  }

  /// Each host of which the coordinator knows that its workers have finished, but its own, is killed, cut off or asked
  /// to end.
  void lose_finished_hosts() {
    const World& world = coordinator_->world();
    for (const Member& member : coordinator_->members()) {
      const int index = member.status.id[0];
      const bool has_finished = world.phase == WorldPhase::kRunning &&
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

  void deliver() {
    std::vector<Message> later;
    std::vector<Message> due;
    for (Message& message : messages_)
      (message.arrives_at <= now_ ? due : later).push_back(std::move(message));
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

  void coordinate() {
    if (!coordinator_ || !running(hosts_[0])) return;
    const BootTime clock = hosts_[0].clock(now_);
    if (clock < look_again_at_) return;
    while (true) {
      const Decision decision = coordinator_->advance(clock);
      if (decision.reason.empty()) fail("a decision without a reason");
      look_again_at_ = decision.look_again_at;
      if (decision.action == Decision::Action::kStart) note_start(decision);
      if (decision.action == Decision::Action::kDone) {
        coordinator_exit_ = coordinator_->exit_status();
        done_ = true;
      }
      const bool waits = decision.action == Decision::Action::kWait || done_;
      for (const Member& member : coordinator_->members()) {
        if (waits && !decision.asks) break;
        Order order = coordinator_->order_for(member.status.id);
        order.asks = decision.asks;
        send(member.status.id, {}, order);
      }
      if (waits) break;
    }
  }

  void note_start(const Decision& decision) {
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
      if (order.place.group_rank != rank || order.place.group_size != size ||
          order.place.first_rank != first) {
        fail("ranks of a host that are not neighbours");
      }
      first += 1 + decision.hosts[static_cast<size_t>(rank)][0] % 3;
    }
  }

  void step_host(int index) {
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

  static void end_workers_by(Host& host, TrueTime at, int status) {
    if (!host.workers || at >= host.end_at) return;
    host.end_at = at;
    host.end_status = status;
  }

  bool complete(uint64_t generation) const {
    const auto found = places_.find(generation);
    return found != places_.end() &&
           std::all_of(found->second.begin(), found->second.end(), [&](const AgentId& id) {
             const Host& host = hosts_[id[0]];
             return host.workers && host.place.generation == generation;
           });
  }

  void check() {
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
      if (now_ < scene_.work && host.workers && running(host) &&
          started_whole_.count(host.place.generation) && !complete(host.place.generation) && chance(0.005)) {
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

  void cause_trouble() {
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

  void kill_coordinator() {
    coordinator_.reset();
    hosts_[0].agent.reset();
    end_workers_by(hosts_[0], now_ + up_to(kKillTime), 137);
    std::erase_if(messages_, [](const Message& message) { return message.agent[0] == 0; });
  }

  void heal() {
    for (Host& host : hosts_) {
      host.cut_until = std::min(host.cut_until, now_);
      host.suspended_until = std::min(host.suspended_until, now_);
      host.agent_stopped_until = std::min(host.agent_stopped_until, now_);
    }
  }

  void start_missing_agents() {
    for (int i = 1; i < scene_.hosts; ++i) {
      if (!hosts_[static_cast<size_t>(i)].agent) start_agent(i);
    }
  }

  bool over() const {
    const bool agents =
        std::any_of(hosts_.begin(), hosts_.end(), [](const Host& host) { return host.agent != nullptr; });
    const bool workers =
        std::any_of(hosts_.begin(), hosts_.end(), [](const Host& host) { return host.workers; });
    return done_ || (!coordinator_ && !agents && !workers);
  }

  void check_end() {
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
    if (coordinator_->world().phase == WorldPhase::kEnding) return fail("the job does not end");
    // It may just give way to the next one, for a host that joins.
    if (now_ - last_whole_ > scene_.options.lost_after)
      return fail("no world runs, though enough hosts are there");
  }

  void fail(const std::string& what) {
    if (problem_.empty())
      problem_ = what + " at " + std::to_string(std::chrono::duration<double>(now_).count()) + " s";
  }

  Scene scene_;
  std::mt19937_64 random_;
  std::vector<Host> hosts_;
  std::map<std::pair<int, bool>, TrueTime> last_arrival_;  // by host and direction
  std::map<int, int> lives_;                               // of the agents on a host
  std::map<int, int> ended_;  // workers' ends that the agent has not yet seen, by host
  std::map<int, int> agent_exits_;
  std::unique_ptr<Coordinator> coordinator_;  // null once it was killed
  std::vector<Message> messages_;
  std::map<uint64_t, std::vector<AgentId>> places_;  // by generation
  std::map<uint64_t, bool> started_whole_;
  std::set<AgentId> gone_;  // of hosts that have finished
  TrueTime now_{0};
  TrueTime last_whole_{0};
  TrueTime longest_outage_{0};
  BootTime look_again_at_ = BootTime::min();
  bool done_ = false;
  int coordinator_exit_ = -1;
  std::string problem_;
};

uint64_t histories() {
  return testing::long_run() ? 5000 : 80;
}

Scene random_scene(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto number = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Scene scene;
  scene.hosts = number(1, 7);
  scene.options.max_hosts = number(1, scene.hosts);
  scene.options.min_hosts = number(1, scene.options.max_hosts);
  scene.options.max_restarts = number(0, 3);
  scene.options.last_call = std::chrono::seconds(number(0, 15));
  scene.options.join_timeout = std::chrono::seconds(400);
  return scene;
}

TEST(MembershipSimulation, NeverRunsTwoWorldsAndAlwaysRunsOneOrEnds) {
  int generations = 0;
  for (uint64_t seed = 1; seed <= histories(); ++seed) {
    Scene scene = random_scene(seed);
    scene.options.max_restarts += 100 * static_cast<int>(seed % 2);
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
    generations += simulation.generations();
  }
  EXPECT_GT(generations, static_cast<int>(histories()));
}

TEST(MembershipSimulation, EnoughSoundHostsAreNeverStoppedForLongByTheOthers) {
  for (uint64_t seed = 1; seed <= histories(); ++seed) {
    Scene scene = random_scene(seed);
    scene.harmless_only = true;
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
    // Each of the others can be lost at the worst moment: when a generation has just been started with it.
    const int others = scene.hosts - scene.options.min_hosts;
    const nanoseconds bound = (others + 1) * (scene.options.lost_after + kStopTime + seconds(3));
    EXPECT_LE(simulation.longest_outage().count(), bound.count()) << "seed " << seed;
    EXPECT_GT(simulation.generations(), 0) << "seed " << seed;
  }
}

TEST(MembershipSimulation, EndsWithSuccessWhenAllHaveFinished) {
  for (uint64_t seed = 1; seed <= histories() / 5; ++seed) {
    Scene scene = random_scene(seed);
    scene.harmless_only = true;
    scene.work = seconds(40);
    scene.chaos = seconds(400);
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
    EXPECT_EQ(simulation.exit_status(), 0) << "seed " << seed;
  }
}

TEST(MembershipSimulation, HostsThatHaveFinishedAreNotNeeded) {
  for (uint64_t seed = 1; seed <= histories() / 5; ++seed) {
    Scene scene = random_scene(seed);
    scene.harmless_only = true;
    scene.finished_hosts_go = true;
    scene.chaos = seconds(40);
    scene.work = seconds(80);  // when what the chaos has left is over
    scene.spread = seconds(30);
    scene.calm = seconds(300);
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
    EXPECT_EQ(simulation.exit_status(), 0) << "seed " << seed;
  }
}

TEST(MembershipSimulation, EndsWhenSomeAskToBeStartedAgain) {
  for (uint64_t seed = 1; seed <= histories() / 5; ++seed) {
    Scene scene = random_scene(seed);
    scene.harmless_only = true;
    scene.work = seconds(40);
    scene.chaos = seconds(400);
    scene.asks_again = 0.3;
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
    EXPECT_GE(simulation.exit_status(), 0) << "the job goes on, seed " << seed;
  }
}

TEST(MembershipSimulation, EndsWhenThoseOfOneHostAloneAskToBeStartedAgain) {
  for (uint64_t seed = 1; seed <= histories() / 5; ++seed) {
    Scene scene = random_scene(seed);
    scene.harmless_only = true;
    scene.chaos = seconds(40);
    scene.work = seconds(80);  // when what the chaos has left is over
    scene.calm = seconds(300);
    scene.one_asks_again = true;
    scene.asks_again = static_cast<double>(seed % 2);  // of the others, once they get a signal
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
    ASSERT_GE(simulation.exit_status(), 0) << "the job goes on, seed " << seed;
    if (scene.asks_again > 0) {
      EXPECT_EQ(simulation.exit_status(), 75) << "seed " << seed;
    }
  }
}

TEST(MembershipSimulation, AllEndWhenTheCoordinatorIsLost) {
  for (uint64_t seed = 1; seed <= histories() / 2; ++seed) {
    Scene scene = random_scene(seed);
    scene.coordinator_dies = true;
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
  }
}

}  // namespace
}  // namespace lockstep::launch::membership_simulation_test
