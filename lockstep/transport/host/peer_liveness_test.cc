#include <chrono>

#include <gtest/gtest.h>

#include <lockstep/transport/host/peer_liveness.h>

namespace lockstep::transport::peer_liveness_test {
namespace {

using namespace std::chrono_literals;
using Action = PeerLiveness::Action;

/// A rank that is looked at each second, with a limit of five.
class Watched {
 public:
  Action look(bool awaited = true, std::chrono::seconds later = 1s) {
    now_ += later;
    return life.look(now_, awaited);
  }

  PeerLiveness life{5s};

 private:
  PeerLiveness::Time now_{};
};

TEST(PeerLiveness, NothingIsExpectedOfARankThatIsNotAwaited) {
  Watched peer;
  for (int second = 0; second < 100; ++second) {
    EXPECT_EQ(peer.look(/*awaited=*/false), Action::kNone);
    EXPECT_EQ(peer.life.state(), PeerState::kAlive);
  }
  // Its silence counts from when it is awaited.
  EXPECT_EQ(peer.look(), Action::kNone);
  EXPECT_EQ(peer.life.silence(), 0s);
}

TEST(PeerLiveness, SilenceLeadsToHeartbeatsThenToSuspicionThenToTheEnd) {
  Watched peer;
  EXPECT_EQ(peer.look(), Action::kNone);
  EXPECT_EQ(peer.look(), Action::kHeartbeat);
  EXPECT_EQ(peer.look(), Action::kHeartbeat);
  EXPECT_EQ(peer.life.state(), PeerState::kAlive);
  EXPECT_EQ(peer.look(), Action::kAskHost);
  EXPECT_EQ(peer.life.state(), PeerState::kSuspected);
  EXPECT_EQ(peer.look(), Action::kAskHost);
  EXPECT_EQ(peer.look(), Action::kGiveUp);
  EXPECT_EQ(peer.life.state(), PeerState::kUnreachable);
  EXPECT_EQ(peer.life.silence(), 5s);
  EXPECT_EQ(peer.look(), Action::kNone);
}

TEST(PeerLiveness, AWordEndsASuspicion) {
  Watched peer;
  for (int second = 0; second < 5; ++second) peer.look();
  EXPECT_EQ(peer.life.state(), PeerState::kSuspected);
  peer.life.hear();
  EXPECT_EQ(peer.life.state(), PeerState::kAlive);
  EXPECT_EQ(peer.look(), Action::kNone);
  EXPECT_EQ(peer.life.silence(), 0s);
  EXPECT_EQ(peer.look(), Action::kHeartbeat);
}

TEST(PeerLiveness, ARankThatSpeaksNeedsNoHeartbeat) {
  Watched peer;
  peer.look();
  for (int time = 0; time < 100; ++time) {
    peer.life.hear();
    EXPECT_EQ(peer.look(true, 0s), Action::kNone);
  }
}

TEST(PeerLiveness, AStoppedRankIsNotGivenUpAsLongAsItsHostSpeaks) {
  Watched peer;
  for (int second = 0; second < 5; ++second) peer.look();
  for (int second = 0; second < 100; ++second) {
    peer.life.hear_of(/*stopped=*/true);
    EXPECT_EQ(peer.look(), Action::kAskHost);
    EXPECT_TRUE(peer.life.is_stopped());
    EXPECT_EQ(peer.life.state(), PeerState::kSuspected);
  }
  // Then the host is silent as well.
  for (int second = 1; second < 4; ++second) EXPECT_EQ(peer.look(), Action::kAskHost) << second;
  EXPECT_EQ(peer.look(), Action::kGiveUp);
}

TEST(PeerLiveness, ARankThatGoesOnIsNotStoppedAnyMore) {
  Watched peer;
  peer.life.hear_of(/*stopped=*/true);
  peer.life.hear();
  EXPECT_FALSE(peer.life.is_stopped());
  peer.life.hear_of(/*stopped=*/true);
  peer.life.hear_of(/*stopped=*/false);
  EXPECT_FALSE(peer.life.is_stopped());
}

TEST(PeerLiveness, ARankWhoseHostSaysThatItRunsIsGivenUpAllTheSame) {
  Watched peer;
  peer.look();
  for (int second = 1; second < 5; ++second) {
    peer.life.hear_of(/*stopped=*/false);
    EXPECT_NE(peer.look(), Action::kGiveUp);
  }
  EXPECT_EQ(peer.look(), Action::kGiveUp);
}

TEST(PeerLiveness, TimeInWhichThisProcessDidNotRunIsNoSilence) {
  Watched peer;
  peer.look();
  EXPECT_EQ(peer.look(true, 3600s), Action::kHeartbeat);
  EXPECT_EQ(peer.life.silence(), 2s);
}

TEST(PeerLiveness, ThatARankIsStoppedHoldsForTheLimitThoughItIsNotAwaited) {
  Watched peer;
  peer.life.hear_of(/*stopped=*/true);
  for (int second = 0; second < 5; ++second) {
    peer.look(/*awaited=*/false);
    EXPECT_TRUE(peer.life.is_stopped());
  }
  peer.look(/*awaited=*/false);
  EXPECT_FALSE(peer.life.is_stopped());
  peer.life.hear_of(/*stopped=*/true);
  peer.life.hear();
  peer.look(/*awaited=*/false);
  EXPECT_FALSE(peer.life.is_stopped());
}

TEST(PeerLiveness, TheFirstEndStays) {
  Watched peer;
  peer.life.end(PeerState::kOwnFault);
  peer.life.end(PeerState::kEnded);
  peer.life.hear();
  EXPECT_EQ(peer.life.state(), PeerState::kOwnFault);
  for (int second = 0; second < 10; ++second) EXPECT_EQ(peer.look(), Action::kNone);
  EXPECT_EQ(peer.life.state(), PeerState::kOwnFault);
}

}  // namespace
}  // namespace lockstep::transport::peer_liveness_test
