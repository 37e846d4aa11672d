#include <gmock/gmock.h>
#include <string>

#include <gtest/gtest.h>

#include <lockstep/launch/membership/agent_state.h>

namespace lockstep::launch::agent_state_test {
namespace {

using Action = AgentState::Action;
using Phase = AgentState::Phase;
using std::chrono::seconds;

/// An agent, its clock, and a coordinator that answers each status.
class Agent {
 public:
  explicit Agent(const MembershipOptions& given = {})
      : options(given), state({.id = {1}, .host = "node-a"}, options, now) {}

  Order order(Command command, uint64_t number, uint64_t generation = 1) {
    return {.job = {7},
            .number = number,
            .status_sent_at = state.status(now).sent_at,
            .command = command,
            .place = {.generation = generation, .group_size = 2, .world_size = 2},
            .reason = "reason " + std::to_string(number)};
  }
  Action obey(const Order& order) {
    state.receive(order, now);
    return state.advance(now);
  }
  void run() {
    EXPECT_EQ(obey(order(Command::kRun, 1)), Action::kStart);
    EXPECT_EQ(state.advance(now), Action::kNothing) << "each action is told once";
  }

  MembershipOptions options;
  BootTime now{seconds(500)};
  AgentState state;
};

TEST(AgentState, StartsEachGenerationOnceAndStopsItWhenItIsOver) {
  Agent agent;
  EXPECT_EQ(agent.state.advance(agent.now), Action::kNothing);
  agent.run();
  EXPECT_EQ(agent.state.status(agent.now).phase, HostPhase::kRunning);
  EXPECT_EQ(agent.obey(agent.order(Command::kRun, 1)), Action::kNothing);
  EXPECT_EQ(agent.obey(agent.order(Command::kIdle, 2)), Action::kStop);
  EXPECT_TRUE(agent.state.reason_is_coordinators());
  EXPECT_EQ(agent.state.status(agent.now).order, 1U) << "not before the workers have ended";
  agent.state.workers_ended(143, "report", agent.now);
  EXPECT_EQ(agent.state.advance(agent.now), Action::kNothing);
  const Status status = agent.state.status(agent.now);
  EXPECT_EQ(status.phase, HostPhase::kIdle);
  EXPECT_EQ(status.order, 2U);
  EXPECT_EQ(status.failure, "report") << "it may be why another host failed";
  EXPECT_EQ(agent.obey(agent.order(Command::kRun, 1)), Action::kNothing) << "an order that was overtaken";
  EXPECT_EQ(agent.obey(agent.order(Command::kRun, 3, 2)), Action::kStart);
}

TEST(AgentState, AnswersEachQuestionAtOnceAndOnce) {
  Agent agent;
  agent.run();
  EXPECT_FALSE(agent.state.take_question());
  Order order = agent.order(Command::kRun, 1);
  for (const uint64_t question : {1, 1, 2}) {
    order.question = question;
    const bool is_new = agent.state.status(agent.now).answers < question;
    EXPECT_EQ(agent.obey(order), Action::kNothing);
    EXPECT_EQ(agent.state.take_question(), is_new);
    EXPECT_EQ(agent.state.status(agent.now).answers, question);
  }
}

TEST(AgentState, TellsHowItsWorkersEnded) {
  Agent agent;
  agent.run();
  agent.state.workers_ended(1, "rank 1 failed first", agent.now, 5);
  EXPECT_EQ(agent.state.advance(agent.now), Action::kNothing);
  Status status = agent.state.status(agent.now);
  EXPECT_EQ(status.phase, HostPhase::kFailed);
  EXPECT_EQ(status.exit_status, 1);
  EXPECT_EQ(status.failure, "rank 1 failed first");
  EXPECT_EQ(status.culprit, 5);
  EXPECT_EQ(agent.obey(agent.order(Command::kRun, 1)), Action::kNothing)
      << "a generation is not started twice";
  EXPECT_EQ(agent.obey(agent.order(Command::kRun, 2, 2)), Action::kStart);
  agent.state.workers_ended(0, "", agent.now);
  status = agent.state.status(agent.now);
  EXPECT_EQ(status.phase, HostPhase::kFinished);
  EXPECT_EQ(status.failure, "");
}

TEST(AgentState, TellsHowWorkersEndThatYield) {
  for (const int exit_status : {0, 1, 75}) {
    Agent agent;
    agent.run();
    EXPECT_EQ(agent.obey(agent.order(Command::kYield, 2)), Action::kStop);
    EXPECT_EQ(agent.obey(agent.order(Command::kYield, 2)), Action::kNothing);
    agent.state.workers_ended(exit_status, "", agent.now);
    const Status status = agent.state.status(agent.now);
    EXPECT_EQ(status.phase, exit_status == 0 ? HostPhase::kFinished : HostPhase::kFailed);
    EXPECT_EQ(status.exit_status, exit_status);
  }
  Agent agent;
  agent.run();
  EXPECT_EQ(agent.obey(agent.order(Command::kYield, 2)), Action::kStop);
  EXPECT_EQ(agent.obey(agent.order(Command::kIdle, 3)), Action::kNothing) << "it has stopped them already";
  agent.state.workers_ended(1, "", agent.now);
  EXPECT_EQ(agent.state.status(agent.now).phase, HostPhase::kIdle);
}

TEST(AgentState, KillsItsWorkersWhenTheLeaseIsOver) {
  Agent agent;
  agent.run();
  const BootTime until = agent.state.lease_until();
  EXPECT_EQ(until, agent.now + agent.options.lease);
  EXPECT_EQ(agent.state.look_again_at(), until);
  agent.now = until - std::chrono::nanoseconds(1);
  EXPECT_EQ(agent.state.advance(agent.now), Action::kNothing);
  agent.now = until;
  EXPECT_EQ(agent.state.advance(agent.now), Action::kKill);
  EXPECT_FALSE(agent.state.reason_is_coordinators());
  EXPECT_EQ(agent.state.advance(agent.now), Action::kNothing);
  agent.state.workers_ended(137, "report", agent.now);
  EXPECT_EQ(agent.state.advance(agent.now), Action::kNothing);
  EXPECT_EQ(agent.state.status(agent.now).phase, HostPhase::kIdle) << "that was no failure of theirs";
  // The network heals: the same generation is over, the next one is taken.
  EXPECT_EQ(agent.obey(agent.order(Command::kRun, 1)), Action::kNothing);
  EXPECT_EQ(agent.obey(agent.order(Command::kRun, 3, 2)), Action::kStart);
}

TEST(AgentState, ALateAnswerDoesNotRenewTheLease) {
  Agent agent;
  const Order late = agent.order(Command::kRun, 1);
  agent.now += agent.options.lease;
  EXPECT_EQ(agent.obey(late), Action::kNothing) << "the coordinator may count this host as lost by now";
  EXPECT_EQ(agent.state.status(agent.now).order, 0U);
  EXPECT_EQ(agent.obey(agent.order(Command::kRun, 1)), Action::kStart);
}

TEST(AgentState, WhatItsGuardianHasKilledWhileItWasStoppedIsNoFailure) {
  Agent agent;
  agent.run();
  agent.now += agent.options.lease;
  agent.state.receive(agent.order(Command::kRun, 1),
                      agent.now);  // the lease is renewed before the ends are seen
  agent.state.workers_ended(137, "report", agent.now);
  EXPECT_EQ(agent.state.status(agent.now).phase, HostPhase::kIdle);
}

TEST(AgentState, WhatItsGuardianKillsByAnOlderLeaseIsNoFailure) {
  Agent agent;
  agent.run();
  agent.state.lapse();
  EXPECT_EQ(agent.state.advance(agent.now), Action::kKill);
  agent.state.workers_ended(137, "report", agent.now);
  EXPECT_EQ(agent.state.status(agent.now).phase, HostPhase::kIdle);
  agent.state.lapse();
  EXPECT_EQ(agent.obey(agent.order(Command::kRun, 2, 2)), Action::kStart) << "that was another generation's";
  agent.state.workers_ended(1, "report", agent.now);
  EXPECT_EQ(agent.state.status(agent.now).phase, HostPhase::kFailed);
}

TEST(AgentState, EndsAsOrdered) {
  Agent agent;
  agent.run();
  Order end = agent.order(Command::kEnd, 2);
  end.exit_status = 3;
  EXPECT_EQ(agent.obey(end), Action::kStop);
  agent.state.workers_ended(143, "", agent.now);
  EXPECT_EQ(agent.state.advance(agent.now), Action::kNothing);
  EXPECT_EQ(agent.state.phase(), Phase::kEnded);
  EXPECT_EQ(agent.state.exit_status(), 3);
  EXPECT_EQ(agent.state.reason(), "reason 2");
}

TEST(AgentState, EndsWhenTheCoordinatorHasEnded) {
  Agent agent;
  agent.run();
  agent.state.refused(agent.now);
  EXPECT_EQ(agent.state.advance(agent.now), Action::kNothing) << "the lease still runs";
  agent.now = agent.state.lease_until();
  EXPECT_EQ(agent.state.advance(agent.now), Action::kKill);
  agent.state.workers_ended(137, "", agent.now);
  agent.state.advance(agent.now);
  EXPECT_EQ(agent.state.phase(), Phase::kEnded);
  EXPECT_EQ(agent.state.exit_status(), 1);
  EXPECT_EQ(agent.state.reason(), "the coordinator has ended, and with it the job");
}

TEST(AgentState, AnotherCoordinatorAtTheSameAddressEndsTheJob) {
  Agent agent;
  agent.run();
  Order stranger = agent.order(Command::kRun, 1);
  stranger.job = {8};
  EXPECT_EQ(agent.obey(stranger), Action::kKill);
  agent.state.workers_ended(137, "", agent.now);
  agent.state.advance(agent.now);
  EXPECT_EQ(agent.state.phase(), Phase::kEnded);
}

TEST(AgentState, WaitsForALostCoordinatorAndThenEnds) {
  Agent agent;
  agent.run();
  agent.now = agent.state.lease_until();
  agent.state.advance(agent.now);
  agent.state.workers_ended(137, "", agent.now);
  EXPECT_EQ(agent.state.advance(agent.now), Action::kNothing);
  EXPECT_EQ(agent.state.look_again_at(), agent.now + agent.options.rejoin_timeout);
  agent.now = agent.state.look_again_at();
  agent.state.advance(agent.now);
  EXPECT_EQ(agent.state.phase(), Phase::kEnded);
  EXPECT_THAT(agent.state.reason(), ::testing::HasSubstr("the coordinator was lost"));

  Agent early;
  early.state.refused(early.now);  // it has not been started yet
  early.state.advance(early.now);
  EXPECT_EQ(early.state.phase(), Phase::kIdle);
  early.now = early.state.look_again_at();
  early.state.advance(early.now);
  EXPECT_EQ(early.state.reason(), "no coordinator answered in time");
}

TEST(AgentState, LeavesOnceTheCoordinatorKnows) {
  Agent agent;
  agent.run();
  agent.state.leave(15, agent.now);
  agent.state.workers_ended(143, "", agent.now);
  EXPECT_EQ(agent.state.advance(agent.now), Action::kNothing);
  EXPECT_EQ(agent.state.status(agent.now).leaving, 15);
  EXPECT_EQ(agent.state.phase(), Phase::kIdle);
  agent.now += seconds(1);
  EXPECT_EQ(agent.obey(agent.order(Command::kRun, 1)), Action::kNothing);
  EXPECT_EQ(agent.state.phase(), Phase::kIdle) << "the job may end with this host, with another exit status";
  EXPECT_EQ(agent.obey(agent.order(Command::kIdle, 2)), Action::kNothing);
  EXPECT_EQ(agent.state.phase(), Phase::kEnded);
  EXPECT_EQ(agent.state.exit_status(), 143);
}

TEST(AgentState, LeavesWhereItsWorkersHaveFinishedOnceTheCoordinatorKnowsBoth) {
  Agent agent;
  agent.run();
  agent.state.leave(15, agent.now);
  agent.now += seconds(1);
  const Order early = agent.order(Command::kRun, 1);
  agent.now += seconds(1);
  agent.state.workers_ended(0, "", agent.now);
  EXPECT_EQ(agent.obey(early), Action::kNothing);
  EXPECT_EQ(agent.state.phase(), Phase::kIdle) << "for the coordinator they still run";
  agent.now += seconds(1);
  EXPECT_EQ(agent.obey(agent.order(Command::kRun, 1)), Action::kNothing);
  EXPECT_EQ(agent.state.phase(), Phase::kEnded);
  EXPECT_EQ(agent.state.exit_status(), 143);
}

TEST(AgentState, OfOneCommandLeavesWithoutFailureWhereItsWorkersHaveFinished) {
  for (const bool finished : {true, false}) {
    Agent agent(MembershipOptions{.one_command = true});
    agent.run();
    agent.state.workers_ended(finished ? 0 : 143, "", agent.now);
    agent.state.leave(15, agent.now);
    agent.now += seconds(1);
    agent.obey(agent.order(finished ? Command::kRun : Command::kIdle, 2));
    EXPECT_EQ(agent.state.phase(), Phase::kEnded);
    EXPECT_EQ(agent.state.exit_status(), finished ? 0 : 143);
  }
}

TEST(AgentState, LeavesAtOnceWhileNoCoordinatorAnswers) {
  Agent early;
  early.state.leave(2, early.now);
  EXPECT_EQ(early.state.advance(early.now), Action::kNothing);
  EXPECT_EQ(early.state.phase(), Phase::kEnded);
  EXPECT_EQ(early.state.exit_status(), 130);

  Agent cut_off;
  cut_off.run();
  cut_off.now = cut_off.state.lease_until();
  EXPECT_EQ(cut_off.state.advance(cut_off.now), Action::kKill);
  cut_off.state.leave(15, cut_off.now);
  EXPECT_EQ(cut_off.state.advance(cut_off.now), Action::kNothing);
  EXPECT_EQ(cut_off.state.phase(), Phase::kKilled) << "its workers have not ended yet";
  cut_off.state.workers_ended(137, "", cut_off.now);
  cut_off.state.advance(cut_off.now);
  EXPECT_EQ(cut_off.state.phase(), Phase::kEnded);
  EXPECT_EQ(cut_off.state.exit_status(), 143);
}

TEST(AgentState, LeavesAtOnceWhereTheCoordinatorHasEnded) {
  Agent agent;
  agent.run();
  agent.state.leave(15, agent.now);
  agent.state.workers_ended(143, "", agent.now);
  agent.state.refused(agent.now);
  agent.state.advance(agent.now);
  EXPECT_EQ(agent.state.phase(), Phase::kEnded) << "its lease still runs, but no agent can be told";
  EXPECT_EQ(agent.state.exit_status(), 143);
}

TEST(AgentState, TellsOfOrdersAlsoOnceItHasEnded) {
  Agent agent;
  agent.state.leave(2, agent.now);
  agent.state.advance(agent.now);
  ASSERT_EQ(agent.state.phase(), Phase::kEnded);
  EXPECT_EQ(agent.obey(agent.order(Command::kEnd, 4)), Action::kNothing);
  EXPECT_EQ(agent.state.status(agent.now).order, 4U) << "the coordinator beside it waits for that";
  EXPECT_EQ(agent.state.exit_status(), 130);
}

}  // namespace
}  // namespace lockstep::launch::agent_state_test
