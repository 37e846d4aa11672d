#include <chrono>
#include <gmock/gmock.h>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/launch/membership/coordinator.h>
#include <lockstep/launch/membership/membership.h>
#include <lockstep/launch/membership/testing/membership_job.h>

namespace lockstep::launch::membership_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Action = MembershipDecision::Action;
using std::chrono::seconds;

TEST(Membership, RestartsAfterFailuresAsOftenAsAllowed) {
  Job job = running_job(options(2, 2, 2), 2);
  for (int restart = 1; restart <= 2; ++restart) {
    job.set(1, HostPhase::kFailed);
    MembershipDecision decision = job.decide_once();
    EXPECT_EQ(decision.action, Action::kWait);
    EXPECT_TRUE(decision.asks) << "node-0 may be the cause, and dead";
    EXPECT_FALSE(job.decide_once().asks);
    job.pass(seconds(1), {0, 1});
    decision = job.decide_once();
    EXPECT_EQ(decision.action, Action::kStop);
    EXPECT_EQ(decision.reason, "workers on node-1 have failed; restart " + std::to_string(restart) + " of 2");
    job.obey({0, 1});
    decision = job.decide_once();
    if (restart == 2) {
      EXPECT_EQ(decision.action, Action::kWait) << "each further restart waits longer";
      job.pass(decision.look_again_at - job.now, {0, 1});
      decision = job.decide_once();
    }
    EXPECT_EQ(decision.action, Action::kStart);
    job.obey({0, 1});
  }
  job.set(0, HostPhase::kFailed);
  job.answer({1});
  job.pass(seconds(1), {0, 1});
  const MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kEnd);
  EXPECT_EQ(decision.exit_status, 1);
  EXPECT_EQ(decision.reason, "workers on node-0 have failed, and all restarts are used up");
}

TEST(Membership, EachFurtherRestartWaitsTwiceAsLongUpToHalfAMinute) {
  const std::vector<int> pauses = {0, 1, 2, 4, 8, 16, 30, 30, 30};
  Job job = running_job(options(1, 1, static_cast<int>(pauses.size())), 1);
  for (const int pause : pauses) {
    job.set(0, HostPhase::kFailed);
    ASSERT_EQ(job.decide_once().action, Action::kStop);
    job.obey({0});
    if (pause > 0) {
      const MembershipDecision decision = job.decide_once();
      EXPECT_EQ(decision.action, Action::kWait);
      EXPECT_EQ(decision.reason, "the workers start again " + std::to_string(pause) + " s after the failure");
      EXPECT_EQ(decision.look_again_at, job.now + seconds(pause));
      job.pass(seconds(pause) - std::chrono::milliseconds(1), {0});
      EXPECT_EQ(job.decide_once().action, Action::kWait);
      job.pass(std::chrono::milliseconds(1), {0});
    }
    ASSERT_EQ(job.decide_once().action, Action::kStart);
    job.obey({0});
  }
}

TEST(Membership, GivesTheOthersTimeToNoticeAFailureByThemselves) {
  Job job = running_job(options(2, 2), 2);
  job.set(1, HostPhase::kFailed);
  const BootTime failed_at = job.now;
  job.answer({0});
  job.pass(std::chrono::milliseconds(1), {0, 1});
  MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kWait);
  EXPECT_EQ(decision.reason, "workers on node-1 have failed; the others are awaited");
  EXPECT_EQ(decision.look_again_at, failed_at + seconds(1));
  job.set(0, HostPhase::kFailed);
  decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kEnd);
  EXPECT_EQ(decision.reason, "workers on node-1 have failed") << "that of node-0 follows from it";
}

TEST(Membership, NamesTheCauseOnAnotherHostAndPassesReportsOn) {
  Job job = running_job(options(3, 3), 3);
  job.say(0).culprit = 1;
  job.say(0).failure = "rank 0 failed first";
  job.set(0, HostPhase::kFailed);
  job.answer({1, 2});
  job.pass(seconds(1), {0, 1, 2});
  const MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kEnd);
  EXPECT_EQ(decision.reason,
            "workers on node-0 have failed because of rank 1 on node-1, as their errors say");
  EXPECT_THAT(job.coordinator.take_reports(), ElementsAre()) << "the coordinator's host has printed its own";
  job.say(1).failure = "rank 1 failed first";
  job.obey({1, 2});
  job.hear(1);
  EXPECT_THAT(job.coordinator.take_reports(),
              ElementsAre("workers on node-1 have failed:\nrank 1 failed first"));
}

TEST(Membership, PassesNoReportsOnWhereOneCommandShowsThoseOfAllHosts) {
  MembershipOptions chosen = options(2, 2);
  chosen.one_command = true;
  Job job = running_job(chosen, 2);
  job.say(1).failure = "rank 1 failed first";
  job.set(1, HostPhase::kFailed);
  EXPECT_THAT(job.coordinator.take_reports(), ElementsAre());
}

/// Workers of node-0 have failed, and node-1 says nothing more: its loss is awaited, and then all are stopped.
MembershipDecision stop_after_loss_of_node_1(Job& job) {
  MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kWait);
  EXPECT_EQ(decision.reason, "workers on node-0 have failed; the end of node-1 may be the cause");
  job.pass(decision.look_again_at - job.now, {0});
  decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kStop);
  return decision;
}

TEST(Membership, DoesNotBlameAHostForTheLossOfAnother) {
  Job job = running_job(options(1, 2), 2);
  job.coordinator.disconnected(id(1));
  job.set(0, HostPhase::kFailed);
  EXPECT_FALSE(stop_after_loss_of_node_1(job).counts_as_restart);
  EXPECT_EQ(job.decide_once().action, Action::kStart);
  EXPECT_EQ(job.coordinator.world().restarts, 0);
}

TEST(Membership, AStatusThatWasOnItsWayBeforeAFailureDoesNotShowThatItsHostLived) {
  Job job = running_job(options(1, 2), 2);
  Status late = job.say(1);
  job.set(0, HostPhase::kFailed);
  EXPECT_TRUE(job.decide_once().asks);
  job.now += std::chrono::milliseconds(300);
  late.sent_at = 1000;  // before it was asked
  EXPECT_TRUE(job.coordinator.receive(late, job.now));
  const MembershipDecision decision = stop_after_loss_of_node_1(job);
  EXPECT_THAT(decision.reason, HasSubstr("no word from node-1"));
  EXPECT_FALSE(decision.counts_as_restart);
}

TEST(Membership, EndsWhenAllHaveFinishedAndAllKnow) {
  Job job = running_job(options(2, 2), 2);
  job.set(0, HostPhase::kFinished);
  EXPECT_EQ(job.decide_once().reason, "1 host of 2 has finished");
  job.set(1, HostPhase::kFinished);
  MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kEnd);
  EXPECT_EQ(decision.exit_status, 0);
  EXPECT_EQ(job.coordinator.order_for(id(1)).command, Command::kEnd);
  EXPECT_EQ(job.decide_once().action, Action::kWait);
  job.obey({0, 1});
  EXPECT_EQ(job.decide_once().action, Action::kDone);
}

TEST(Membership, AHostThatHasFinishedMayBeLostOrLeave) {
  for (const bool leaves : {false, true}) {
    Job job = running_job(options(1, 2), 2);
    job.set(1, HostPhase::kFinished);
    job.say(1).leaving = leaves ? 15 : 0;
    job.hear(1);
    job.coordinator.disconnected(id(1));
    job.pass(seconds(20), {0});
    const MembershipDecision decision = job.decide_once();
    EXPECT_EQ(decision.action, Action::kWait) << decision.reason;
    EXPECT_GT(decision.look_again_at, job.now) << "nothing changes by its loss";
    job.set(0, HostPhase::kFinished);
    EXPECT_EQ(job.decide_once().exit_status, 0);
    EXPECT_EQ(job.coordinator.world().phase, MembershipPhase::kEnding);
    job.obey({0});
    EXPECT_EQ(job.decide_once().action, Action::kDone);
  }
}

TEST(Membership, AHostThatHasFinishedAndIsLostIsNotTheCauseOfAFailure) {
  Job job = running_job(options(2, 2, 1), 2);
  job.set(1, HostPhase::kFinished);
  job.coordinator.disconnected(id(1));
  job.pass(seconds(20), {0});
  job.set(0, HostPhase::kFailed);
  EXPECT_EQ(job.decide_once().reason, "workers on node-0 have failed; restart 1 of 1");
}

TEST(Membership, PassesOnThatAllAskToBeStartedAgain) {
  Job job = running_job(options(2, 2, 5), 2);
  job.say(0).exit_status = 75;
  job.say(0).leaving = 15;
  job.set(0, HostPhase::kFailed);
  EXPECT_EQ(job.decide_once().action, Action::kWait);
  job.say(1).exit_status = 75;
  job.set(1, HostPhase::kFailed);
  const MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kEnd);
  EXPECT_EQ(decision.exit_status, 75);
}

/// Of two hosts the first has ended with 75, and the second one does not notice it.
Job yielding_job(const MembershipOptions& chosen, int leaving) {
  Job job = running_job(chosen, 2);
  job.say(1).leaving = leaving;
  job.say(1).exit_status = 75;
  job.set(1, HostPhase::kFailed);
  job.hear(0);
  EXPECT_EQ(job.decide_once().action, Action::kWait);
  job.pass(std::chrono::milliseconds(1), {0, 1});
  MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kWait) << "it may be about to stop";
  job.pass(decision.look_again_at - job.now, {0, 1});
  decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kYield);
  EXPECT_EQ(decision.reason,
            "workers on node-1 have stopped and ask to be started again; those on node-0 are asked to stop, "
            "too");
  EXPECT_EQ(job.coordinator.order_for(id(0)).command, Command::kYield);
  EXPECT_EQ(job.decide_once().action, Action::kWait);
  job.pass(seconds(20), {0, 1});
  EXPECT_EQ(job.decide_once().action, Action::kWait) << "it has its grace period";
  return job;
}

TEST(Membership, AHostThatAsksToBeStartedAgainStopsTheOthers) {
  Job job = yielding_job(options(2, 2, 5), 0);
  job.say(0).exit_status = 75;
  job.set(0, HostPhase::kFailed);
  EXPECT_EQ(job.decide_once().exit_status, 75);

  Job mixed = yielding_job(options(2, 2, 5), 0);
  mixed.say(0).exit_status = 1;
  mixed.set(0, HostPhase::kFailed);
  EXPECT_EQ(mixed.decide_once().reason,
            "workers on node-1 ask to be started again, and not all others do; restart 1 of 5");

  Job drained = yielding_job(options(1, 2), 15);
  drained.say(0).exit_status = 1;
  drained.set(0, HostPhase::kFailed);
  EXPECT_EQ(drained.decide_once().reason, "node-1 was asked to end by signal 15; the others go on without");
}

TEST(Membership, AHostThatWasAskedToEndFailsNotTheOthersThatNoticeIt) {
  for (const bool first : {true, false}) {
    Job job = running_job(options(1, 2), 2);
    job.say(1).leaving = 15;
    job.say(1).exit_status = 75;
    job.say(0).exit_status = 1;
    job.set(first ? 1 : 0, HostPhase::kFailed);
    job.pass(std::chrono::milliseconds(1), {0, 1});
    job.set(first ? 0 : 1, HostPhase::kFailed);
    const MembershipDecision decision = job.decide_once();
    if (first) {
      EXPECT_EQ(decision.reason, "node-1 was asked to end by signal 15; the others go on without");
    } else {
      EXPECT_EQ(decision.exit_status, 1);
    }
  }
}

TEST(Membership, AHostThatAsksToBeStartedAgainHasFailedWhereAnotherHasFinished) {
  for (const int restarts : {0, 1}) {
    Job job = running_job(options(2, 2, restarts), 2);
    job.say(0).exit_status = 75;
    job.set(0, HostPhase::kFailed);
    job.answer({1});
    EXPECT_THAT(job.decide_once().reason, HasSubstr("the others are awaited"));
    job.set(1, HostPhase::kFinished);
    EXPECT_EQ(job.decide_once().action, restarts == 0 ? Action::kEnd : Action::kStop);
  }
}

TEST(Membership, EndsWithTheCoordinatorsSignalAndGoesOnWithoutAnotherHost) {
  Job job = running_job(options(1, 2), 2);
  job.say(1).leaving = 15;
  job.hear(1);
  EXPECT_EQ(job.decide_once().action, Action::kWait) << "its workers have got the signal, too";
  job.set(1, HostPhase::kFailed);
  EXPECT_EQ(job.decide_once().reason, "node-1 was asked to end by signal 15; the others go on without");
  job.obey({0});
  EXPECT_EQ(job.decide_once().action, Action::kStart);
  job.obey({0});
  job.say(0).leaving = 2;
  job.set(0, HostPhase::kFailed);
  const MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kEnd);
  EXPECT_EQ(decision.exit_status, 130);
}

TEST(Membership, AHostThatLeavesBeforeItStartsIsNotBlamed) {
  Job job(options(1, 2));
  job.hear(0);
  job.hear(1);
  ASSERT_EQ(job.decide_once().action, Action::kStart);
  job.obey({0});
  job.say(1).order = job.coordinator.order_for(id(1)).number;  // it has got the order, and starts nothing
  job.say(1).leaving = 15;
  job.hear(1);
  EXPECT_EQ(job.decide_once().reason, "node-1 was asked to end by signal 15; the others go on without");
}

TEST(Membership, SaysThatTheOthersWaitWhereTooFewAreLeft) {
  Job job = running_job(options(3, 3), 3);
  job.coordinator.disconnected(id(1));
  job.pass(seconds(10), {0, 2});
  EXPECT_EQ(job.decide_once().reason,
            "no word from node-1 for 10 s; too few are left to go on without, and wait for 60 s");
}

}  // namespace
}  // namespace lockstep::launch::membership_test
