#include <gmock/gmock.h>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/launch/membership/membership.h>
#include <lockstep/launch/membership/testing/membership_job.h>

namespace lockstep::launch::membership_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Action = MembershipDecision::Action;
using std::chrono::seconds;

Member member(uint8_t number, BootTime joined_at = {}) {
  return {.status = {.id = id(number), .host = "node-" + std::to_string(number)},
          .heard_at = joined_at,
          .joined_at = joined_at,
          .is_coordinator = number == 0};
}

TEST(Membership, StartsAtOnceWithAllAndAfterTheLastCallWithEnough) {
  Job job(options(2, 3));
  job.hear(0);
  MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kWait);
  EXPECT_EQ(decision.reason, "1 host of at least 2 is here: node-0");
  EXPECT_EQ(decision.look_again_at, job.now + std::chrono::minutes(10));
  job.now += seconds(5);
  job.hear(0);
  job.hear(1);
  decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kWait);
  EXPECT_THAT(decision.reason, HasSubstr("2 hosts of 3 are here; more may come for 30 s"));
  EXPECT_EQ(decision.look_again_at, job.now + seconds(30));
  const std::string text = decision.reason;
  job.pass(seconds(20), {0, 1});
  EXPECT_EQ(job.decide_once().reason, text) << "it is printed where it changes";
  job.pass(seconds(10), {0, 1});
  decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kStart);
  EXPECT_THAT(decision.hosts, ElementsAre(id(0), id(1)));

  Job complete(options(2, 3));
  for (uint8_t i = 0; i < 3; ++i) complete.hear(i);
  EXPECT_EQ(complete.decide_once().action, Action::kStart);
}

TEST(Membership, EndsWhenTooFewHaveCome) {
  Job job(options(2, 2));
  job.now += std::chrono::minutes(10);
  job.hear(0);
  const MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kEnd);
  EXPECT_EQ(decision.exit_status, 1);
  EXPECT_EQ(decision.reason,
            "1 host of at least 2 is here: node-0, 600 s after the start (join_timeout): the job ends");
}

TEST(Membership, CountsRanksOfUnequalHosts) {
  Job job(options(3, 3));
  job.say(0).nproc = 2;
  job.say(1).nproc = 1;
  job.say(2).nproc = 4;
  for (uint8_t i = 0; i < 3; ++i) job.hear(i);
  ASSERT_EQ(job.decide_once().action, Action::kStart);
  EXPECT_EQ(job.coordinator.order_for(id(0)).place, (Place{1, 0, 3, 0, 7, 0, 0, 7}));
  EXPECT_EQ(job.coordinator.order_for(id(1)).place, (Place{1, 1, 3, 2, 7, 0, 2, 7}));
  EXPECT_EQ(job.coordinator.order_for(id(2)).place, (Place{1, 2, 3, 3, 7, 0, 3, 7}));
}

TEST(Membership, CountsRanksByRole) {
  Job job(options(4, 4));
  for (uint8_t i = 0; i < 4; ++i) {
    job.say(i).nproc = i + 1;
    job.say(i).role = i % 2 == 0 ? "trainer" : "reader";
    job.hear(i);
  }
  ASSERT_EQ(job.decide_once().action, Action::kStart);
  const auto role_of = [&](uint8_t number) {
    const Place place = job.coordinator.order_for(id(number)).place;
    return std::pair(place.first_role_rank, place.role_world_size);
  };
  EXPECT_EQ(role_of(0), std::pair(0, 4));
  EXPECT_EQ(role_of(1), std::pair(0, 6));
  EXPECT_EQ(role_of(2), std::pair(1, 4));
  EXPECT_EQ(role_of(3), std::pair(2, 6));
}

TEST(Membership, GoesOnWithoutALostHostOnceItsLeaseIsOver) {
  Job job = running_job(options(2, 3), 3);
  job.coordinator.disconnected(id(1));
  job.now += seconds(9);
  job.obey({0, 2});
  EXPECT_EQ(job.decide_once().action, Action::kWait) << "its workers may still run";
  job.now += seconds(1);
  job.obey({0, 2});
  MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kStop);
  EXPECT_EQ(decision.reason, "no word from node-1 for 10 s; the others go on without");
  job.obey({0});
  decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kWait);
  EXPECT_EQ(decision.reason, "the workers of node-2 have to end first");
  job.obey({2});
  decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kStart);
  EXPECT_THAT(decision.hosts, ElementsAre(id(0), id(2)));
}

TEST(Membership, WaitsForLostHostsWhenTooFewAreLeft) {
  Job job = running_job(options(2, 2), 2);
  job.now += seconds(10);
  job.obey({0});
  EXPECT_EQ(job.decide_once().action, Action::kStop);
  job.obey({0});
  EXPECT_THAT(job.decide_once().reason, HasSubstr("1 host of at least 2 is here: node-0"));
  job.now += seconds(30);
  job.say(1).phase = HostPhase::kIdle;
  job.obey({0, 1});
  EXPECT_EQ(job.decide_once().action, Action::kStart);

  Job alone = running_job(options(2, 2), 2);
  alone.now += seconds(10);
  alone.obey({0});
  EXPECT_EQ(alone.decide_once().action, Action::kStop);
  alone.obey({0});
  alone.pass(seconds(60), {0});
  const MembershipDecision decision = alone.decide_once();
  EXPECT_EQ(decision.action, Action::kEnd);
  EXPECT_THAT(decision.reason, HasSubstr("60 s after the others were lost"));
}

TEST(Membership, WaitsForLostHostsFromTheEndOfTheOthersWorkersOn) {
  Job job = running_job(options(2, 2), 2);
  job.pass(seconds(10), {0});
  EXPECT_EQ(job.decide_once().action, Action::kStop);
  job.pass(seconds(70), {0});  // as long as its workers take to stop
  EXPECT_EQ(job.decide_once().reason, "the workers of node-0 have to end first");
  job.obey({0});
  const MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kWait);
  EXPECT_EQ(decision.look_again_at, job.now + seconds(60));
  job.pass(seconds(60), {0});
  EXPECT_EQ(job.decide_once().action, Action::kEnd);
}

TEST(Membership, DoesNotCountAnIdleStatusThatIsOlderThanTheOrderToRun) {
  Job job(options(2, 2, 1));
  job.hear(0);
  job.hear(1);
  ASSERT_EQ(job.decide_once().action, Action::kStart);
  job.obey({0});
  job.set(0, HostPhase::kFailed);
  job.answer({1});
  job.pass(seconds(1), {0, 1});  // node-1 has not yet heard of the generation
  EXPECT_EQ(job.decide_once().action, Action::kStop);
  job.obey({0});
  job.hear(1);
  MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kWait) << "the order to run may be on its way to node-1";
  EXPECT_EQ(decision.reason, "the workers of node-1 have to end first");
  job.obey({1});
  EXPECT_EQ(job.decide_once().action, Action::kStart);
}

TEST(Membership, TakesLateHostsInUpToTheMost) {
  Job job = running_job(options(1, 2), 1);
  job.hear(1);
  job.hear(2);
  MembershipDecision decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kWait);
  EXPECT_EQ(decision.look_again_at, job.now + seconds(1)) << "others may come in the same moment";
  job.pass(seconds(1), {0, 1, 2});
  decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kStop);
  EXPECT_EQ(decision.reason, "node-1, node-2 join");
  job.obey({0, 1, 2});
  decision = job.decide_once();
  EXPECT_EQ(decision.action, Action::kStart);
  EXPECT_THAT(decision.hosts, ElementsAre(id(0), id(1)));
  job.obey({0, 1});
  job.pass(seconds(5), {0, 1, 2});
  EXPECT_EQ(job.decide_once().reason, "generation 2 runs on 2 hosts");
}

/// The host that has come back is taken into the world, and not before it has stayed for longer with each loss.
void takes_in_after_losses(Job& job, int losses) {
  job.pass(seconds(1 << losses) - std::chrono::milliseconds(1), {0, 1});
  EXPECT_EQ(job.decide_once().action, Action::kWait);
  job.pass(std::chrono::milliseconds(1), {0, 1});
  ASSERT_EQ(job.decide_once().action, Action::kStop);
  job.obey({0, 1});
  ASSERT_EQ(job.decide_once().action, Action::kStart);
  job.obey({0, 1});
}

TEST(Membership, WaitsLongerForAHostThatComesAndGoes) {
  Job job = running_job(options(1, 2), 2);
  for (int loss = 1; loss <= 3; ++loss) {
    job.pass(seconds(10), {0});
    ASSERT_EQ(job.decide_once().action, Action::kStop);
    job.obey({0});
    ASSERT_EQ(job.decide_once().action, Action::kStart);
    job.obey({0});
    job.say(1).phase = HostPhase::kIdle;
    job.obey({1});
    takes_in_after_losses(job, loss);
  }
}

TEST(Membership, WaitsLongerForAHostWhoseAgentsComeAndGo) {
  Job job = running_job(options(1, 2), 2);
  for (int loss = 1; loss <= 3; ++loss) {
    job.replace(1);
    job.pass(seconds(10), {0});
    ASSERT_EQ(job.decide_once().action, Action::kStop);
    job.obey({0});
    ASSERT_EQ(job.decide_once().action, Action::kStart);
    job.obey({0, 1});
    EXPECT_EQ(job.coordinator.members().size(), 2U) << "the one before has made room";
    EXPECT_EQ(job.coordinator.members().back().losses, loss);
    takes_in_after_losses(job, loss);
  }
}

TEST(Membership, AgentsBesideEachOtherOnOneHostAreNoLosses) {
  Job job(options(1, 4));
  for (uint8_t number = 0; number < 3; ++number) {
    EXPECT_TRUE(job.coordinator.receive({.id = id(number), .sent_at = 1, .host = "node-0"}, job.now));
  }
  for (const Member& member : job.coordinator.members()) EXPECT_EQ(member.losses, 0);
}

TEST(Membership, TellsHostsNothingOfThePhaseBefore) {
  Job job = running_job(options(1, 2), 1);
  job.hear(1);
  job.obey({0});
  EXPECT_THAT(job.decide_once().reason, HasSubstr("node-1 may join soon"));
  job.pass(seconds(1), {0, 1});
  ASSERT_EQ(job.decide_once().action, Action::kStop);
  EXPECT_EQ(job.coordinator.order_for(id(0)).reason, "node-1 joins");
  job.decide_once();
  EXPECT_EQ(job.coordinator.order_for(id(0)).reason, "node-1 joins; the workers of node-0 have to end first");
}

TEST(Membership, IgnoresAStatusThatComesTwiceOrTooLate) {
  Job job = running_job(options(1, 2), 2);
  Status old = job.say(1);
  old.phase = HostPhase::kFailed;
  job.now += seconds(10);
  EXPECT_TRUE(job.coordinator.receive(old, job.now));
  old.sent_at = 0;
  EXPECT_TRUE(job.coordinator.receive(old, job.now));
  job.obey({0});
  EXPECT_EQ(job.decide_once().action, Action::kStop) << "node-1 is lost all the same";
}

TEST(AssignPlaces, LeavesEachWhereItWasAndFillsGaps) {
  std::vector<Member> hosts = {member(0), member(2), member(3, BootTime(seconds(5))),
                               member(4, BootTime(seconds(4)))};
  hosts[0].last_place = 0;
  hosts[1].last_place = 2;
  EXPECT_THAT(assign_places(hosts), ElementsAre(id(0), id(4), id(2), id(3)));
  hosts.resize(2);
  EXPECT_THAT(assign_places(hosts), ElementsAre(id(0), id(2)));
}

TEST(AssignPlaces, ObeysNodeRanks) {
  std::vector<Member> hosts = {member(0), member(1), member(2)};
  hosts[0].status.node_rank = 2;
  hosts[1].status.node_rank = 0;
  hosts[2].status.node_rank = 1;
  hosts[2].last_place = 0;
  EXPECT_THAT(assign_places(hosts), ElementsAre(id(1), id(2), id(0)));
}

TEST(AssignPlaces, PrefersTheOneThatWasThereLast) {
  std::vector<Member> hosts = {member(0), member(1), member(2)};
  hosts[1].last_place = 1;
  hosts[1].status.generation = 3;
  hosts[2].last_place = 1;
  hosts[2].status.generation = 7;
  hosts[0].last_place = 0;
  EXPECT_THAT(assign_places(hosts), ElementsAre(id(0), id(2), id(1)));
}

TEST(Membership, TwoHostsOfOneNodeRankDoNotStart) {
  Job job(options(2, 2));
  job.say(0).node_rank = 0;
  job.say(1).node_rank = 0;
  job.hear(0);
  job.hear(1);
  EXPECT_EQ(
      job.decide_once().reason,
      "1 host of at least 2 is here: node-0 (node rank 0); missing: node rank 1; not node-1 (node rank 0), "
      "for another host has that --node-rank");
}

TEST(Membership, SaysWhichNodeRanksAreMissing) {
  Job job(options(12, 12));
  for (const uint8_t rank : {0, 2}) {
    job.say(rank).node_rank = rank;
    job.hear(rank);
  }
  EXPECT_THAT(job.decide_once().reason, HasSubstr("; missing: node rank 1, 3, 4, 5, 6, 7, 8, 9 and 2 more"));
}

TEST(Membership, AHostWithoutAPlaceIsToldWhy) {
  Job job = running_job(options(2, 2), 2);
  job.hear(2);
  EXPECT_EQ(job.decide_once().action, Action::kWait);
  EXPECT_EQ(job.coordinator.order_for(id(2)).reason,
            "generation 1 runs on 2 hosts, and --nnodes allows no more");
  job.say(1).node_rank = 1;
  job.hear(1);
  job.say(3).node_rank = 1;
  job.hear(3);
  EXPECT_EQ(job.decide_once().action, Action::kWait);
  EXPECT_EQ(job.coordinator.order_for(id(3)).reason,
            "generation 1 runs on 2 hosts, and another host has --node-rank 1");
  job.replace(1);  // its agent is started again
  job.say(1).node_rank = 1;
  job.hear(1);
  EXPECT_EQ(job.decide_once().action, Action::kWait);
  EXPECT_EQ(
      job.coordinator.order_for(job.id_of(1)).reason,
      "generation 1 runs on 2 hosts, and this host's former agent has its place until it counts as lost");
}

TEST(Membership, AHostThatHasFinishedIsToldForWhatItWaits) {
  Job job = running_job(options(2, 2), 2);
  job.set(1, HostPhase::kFinished);
  EXPECT_EQ(job.decide_once().action, Action::kWait);
  EXPECT_EQ(job.coordinator.order_for(id(1)).reason, "1 host of 2 has finished");
}

TEST(Membership, AHostWithOtherOptionsIsRefused) {
  Job job(options(2, 3, 1));
  Status status = job.say(1);
  status.options = common_options(options(2, 3, 1));
  EXPECT_FALSE(job.coordinator.refusal_of(status));
  MembershipOptions other = options(3, 3, 2);
  other.lease = std::chrono::milliseconds(8500);
  status.options = common_options(other);
  const auto refusal = job.coordinator.refusal_of(status);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->command, Command::kEnd);
  EXPECT_EQ(refusal->exit_status, 1);
  EXPECT_EQ(refusal->reason,
            "node-1 has --nnodes=3 where the coordinator has --nnodes=2:3, and --max-restarts=2 where the "
            "coordinator has --max-restarts=1, and --rdzv-conf=lease=8.5 where the coordinator has "
            "--rdzv-conf=lease=8; give all hosts of a job the same");
  EXPECT_THAT(job.coordinator.take_reports(), ElementsAre(refusal->reason));
}

TEST(MembershipOptions, AreCheckedAgainstEachOther) {
  EXPECT_EQ(objection_to(options(1, 1)), std::nullopt);
  EXPECT_THAT(objection_to(options(0, 1)).value_or(""), HasSubstr("must be 1 or more"));
  EXPECT_THAT(objection_to(options(3, 2)).value_or(""), HasSubstr("below the least"));
  MembershipOptions late = options(1, 1);
  late.lost_after = seconds(9);
  EXPECT_THAT(objection_to(late).value_or(""), HasSubstr("15 % and half a second more than the lease"));
  MembershipOptions restless = options(1, 1);
  restless.heartbeat_interval = seconds(3);
  EXPECT_THAT(objection_to(restless).value_or(""), HasSubstr("three heartbeat intervals"));
  restless.heartbeat_interval = std::chrono::milliseconds(9);
  EXPECT_THAT(objection_to(restless).value_or(""), HasSubstr("0.01 s or more"));
}

}  // namespace
}  // namespace lockstep::launch::membership_test
