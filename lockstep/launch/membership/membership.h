#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/boot_clock.h>
#include <lockstep/launch/membership/messages.h>

/// Which hosts belong to a job's world now. The coordinator is the agent at the job's endpoint. It alone decides,
/// by decide(), a pure function; the other agents obey (AgentState).
///
/// A *generation* is one world: the workers of some hosts, started together, with ranks and a store of their own.
/// There are never two at once:
/// - The coordinator's host belongs to each, so that no part of a network without it makes one.
/// - A new one begins only when the workers of the former one have ended on all its hosts: their agents said so,
///   or have not been heard of for `lost_after`.
/// - An agent ends its workers by itself when the coordinator has not answered for `lease`, which is shorter.
///   Clocks may run 5 % fast or slow, and the kill may take half a second.
/// - A host that was suspended all the while has workers of an old generation when it wakes up, until its agent
///   looks at the clock. They get no new connection to the store: the generation is checked where a tunnel's
///   stream begins. Connections that they have, and those between workers, end with the other hosts' workers.
///   They neither join a job nor give a checkpoint its name: see objection_to_old_generation().
namespace lockstep::launch {

struct MembershipOptions {
  int min_hosts = 1;
  int max_hosts = 1;
  int max_restarts = 0;  // of the whole job, after workers have failed; a lost or a late host costs none
  std::chrono::nanoseconds heartbeat_interval = std::chrono::seconds(1);
  std::chrono::nanoseconds lease = std::chrono::seconds(8);
  std::chrono::nanoseconds lost_after = std::chrono::seconds(10);
  std::chrono::nanoseconds join_timeout = std::chrono::minutes(10);  // for the first min_hosts
  std::chrono::nanoseconds last_call = std::chrono::seconds(30);     // for more, once min_hosts are there
  std::chrono::nanoseconds settling =
      std::chrono::seconds(1);  // a late host's, before the others stop for it
  std::chrono::nanoseconds rejoin_timeout = std::chrono::minutes(1);  // for lost hosts, when too few are left
  // The agents were started by one command, which ends them all where one fails (-H). The agent of a host whose workers have
  // all finished ends with 0 then, also by a signal. What they write has one reader, so none repeats another's words.
  bool one_command = false;
  std::chrono::nanoseconds reaction_time =
      std::chrono::seconds(1);  // for the others to notice by themselves that workers have ended
};

/// What is wrong with the options, with the remedy; nothing where they make sense.
std::optional<std::string> objection_to(const MembershipOptions& options);

/// Those that the agents of a job have to have alike, one a line, as the command line has them. The coordinator goes by its own
/// number of hosts and restarts; and where an agent's lease were longer than the coordinator knows, two worlds could run.
std::string common_options(const MembershipOptions& options);

/// One agent as the coordinator knows it.
struct Member {
  Status status = {};           // the last one
  BootTime heard_at = {};       // when that came
  BootTime phase_since = {};    // when a status told of its present phase first
  BootTime resumed_at = {};     // when a silence of two heartbeats or more ended last
  BootTime joined_at = {};      // when it was first heard, or heard again after it was lost
  bool is_coordinator = false;  // the coordinator's own agent
  bool connected = true;        // its connection is open; a closed one alone says nothing of its workers
  int losses = 0;               // how often its host was lost and came back, by this agent or another
  uint64_t run_order = 0;       // the number of the last order to run that was made for it; 0: none
  uint64_t reported = 0;        // the last generation of which a failure of its workers was reported
  int32_t last_place = -1;      // its group rank in the last generation that it belonged to
};

/// It was not heard for so long that its agent has ended its workers.
bool is_lost(const Member& member, const MembershipOptions& options, BootTime now);
/// Its connection is closed, or two of its heartbeats have not come.
bool is_silent(const Member& member, const MembershipOptions& options, BootTime now);
/// It said that its workers have ended, after the last order to run that may have reached it.
bool has_stopped(const Member& member);

enum class MembershipPhase : uint8_t {
  kForming,   // the workers of the last generation end, and hosts for the next are awaited
  kRunning,   // generation `generation` runs
  kYielding,  // it does, but its workers are asked to stop, for some have stopped and ask to be started again
  kEnding,    // all agents are told to end
};

/// The job as the last decision left it.
struct MembershipState {
  MembershipPhase phase = MembershipPhase::kForming;
  BootTime since = {};              // when it entered this phase
  uint64_t order = 0;               // the number of the last decision that changed something
  uint64_t generation = 0;          // the last one that was started
  std::vector<AgentId> hosts = {};  // of that generation, by group rank
  int restarts = 0;                 // after failures
  bool after_failure = false;       // in kForming: a failure ended the last generation
};

struct MembershipDecision {
  enum class Action : uint8_t {
    kWait,   // nothing changes until a message comes or it is `look_again_at`
    kStart,  // the next generation, of `hosts`
    kYield,  // the workers that still run are asked to stop, and how they end decides
    kStop,   // all workers; a next generation is formed
    kEnd,    // the job, with `exit_status`
    kDone,   // in kEnding: no host has workers any more
  };
  Action action = Action::kWait;
  std::string reason =
      {};  // why, in words for people; always there, and the same while nothing but the time changes
  std::vector<AgentId> hosts = {};
  bool counts_as_restart = false;
  int exit_status = 0;
  bool asks = false;  // with kWait: of each host a status is wanted at once that answers the question `order`
  BootTime look_again_at = BootTime::max();
};

/// What is to be done at `now`. Pure.
MembershipDecision decide(const MembershipState& world, const std::vector<Member>& members,
                          const MembershipOptions& options, BootTime now);

/// The order in which hosts get their group ranks. With --node-rank by that; otherwise each stays where it was in
/// the last generation, and the others, in the order in which they joined, fill what is free. Pure.
std::vector<AgentId> assign_places(std::vector<Member> chosen);

}  // namespace lockstep::launch
