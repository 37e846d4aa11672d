#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/launch/membership/agent_state.h>
#include <lockstep/launch/membership/coordinator.h>

/// A job on several hosts, of which only the state machines are real.
namespace lockstep::launch::simulation {

using std::chrono::nanoseconds;
using std::chrono::seconds;

using TrueTime = nanoseconds;  // which no host knows

constexpr seconds kStopTime(3);  // from SIGTERM, at most

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

/// One history of such a job, which is the same for the same seed.
class Simulation {
 public:
  Simulation(const Scene& scene, uint64_t seed);

  /// Runs the history, and then some time in which nothing more happens. False once a property does not hold.
  bool run();

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

  AgentId id_of(int host) const;
  void start_agent(int index);
  bool running(const Host& host) const { return now_ >= host.suspended_until; }
  bool agent_runs(const Host& host) const {
    return host.agent && running(host) && now_ >= host.agent_stopped_until;
  }
  bool linked(int index) const { return index == 0 || now_ >= hosts_[static_cast<size_t>(index)].cut_until; }

  /// In order, as one connection does; or, where the scene says so, late, twice, or overtaken, as an old connection and
  /// its successor do in the worst case.
  void send(const AgentId& agent, std::optional<Status> status, std::optional<Order> order);
  void tick();

  /// Each host of which the coordinator knows that its workers have finished, but its own, is killed, cut off or asked
  /// to end.
  void lose_finished_hosts();
  void deliver();
  void coordinate();
  void note_start(const MembershipDecision& decision);
  void step_host(int index);
  static void end_workers_by(Host& host, TrueTime at, int status);
  bool complete(uint64_t generation) const;
  void check();
  void cause_trouble();
  void kill_coordinator();
  void heal();
  void start_missing_agents();
  bool over() const;
  void check_end();
  void fail(const std::string& what);

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

}  // namespace lockstep::launch::simulation
