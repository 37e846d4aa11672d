#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include <gtest/gtest.h>

#include <lockstep/base/boot_clock.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/event_loop.h>
#include <lockstep/launch/control_plane/listener.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/testing/few_descriptors.h>
#include <lockstep/launch/control_plane/testing/scene.h>

namespace lockstep::launch::listener_test {
namespace {

using testing::FewDescriptors;
using testing::loopback;

/// Takes what comes to a port.
struct Taker : EventHandler {
  void on_events(int, short) override {
    ++calls;
    taken = listener.accept(make_room);
  }

  /// Until it has been called so often.
  void turn_until(int count) {
    const BootTime limit = BootClock::now() + std::chrono::seconds(60);
    while (calls < count && BootClock::now() < limit) loop.run_once(limit);
    ASSERT_EQ(calls, count);
  }

  EventLoop loop;
  uint16_t port = 0;
  Listener listener{loop, listen_on_loopback(port), *this};
  std::function<bool()> make_room;
  int calls = 0;
  UniqueFd taken;
};

TEST(Listener, DoesNotLookAgainAndAgainWhileNoDescriptorIsLeft) {
  Taker taker;
  const UniqueFd client = begin_connect(loopback(taker.port));
  EXPECT_EQ(taker.listener.serve(BootClock::now()), BootTime::max());
  {
    const FewDescriptors none(0);
    taker.turn_until(1);
    for (int i = 0; i < 10; ++i) taker.loop.run_once(BootClock::now());
    EXPECT_EQ(taker.calls, 1);
  }
  EXPECT_FALSE(taker.taken);
  const BootTime later = taker.listener.serve({});
  ASSERT_LT(later, BootTime::max());
  EXPECT_EQ(taker.listener.serve(later), BootTime::max());
  taker.turn_until(2);
  EXPECT_TRUE(taker.taken) << "it has waited in the queue";
}

TEST(Listener, TakesAConnectionForWhichSomethingElseIsClosed) {
  Taker taker;
  UniqueFd old = begin_connect(loopback(taker.port));
  const UniqueFd client = begin_connect(loopback(taker.port));
  taker.make_room = [&old] { return static_cast<bool>(std::exchange(old, {})); };
  const FewDescriptors none(0);
  taker.turn_until(1);
  EXPECT_TRUE(taker.taken);
  EXPECT_FALSE(old);
  taker.turn_until(2);
  EXPECT_FALSE(taker.taken) << "there is nothing left to close";
  EXPECT_LT(taker.listener.serve({}), BootTime::max());
}

TEST(Listener, ClosesNothingForAConnectionThatHasNotCome) {
  Taker taker;
  bool asked = false;
  const auto make_room = [&asked] { return !std::exchange(asked, true); };
  const FewDescriptors none(0);
  EXPECT_FALSE(taker.listener.accept(make_room));
  EXPECT_FALSE(asked);
  EXPECT_EQ(taker.listener.serve(BootClock::now()), BootTime::max());
}

}  // namespace
}  // namespace lockstep::launch::listener_test
