#include <chrono>
#include <optional>
#include <signal.h>

#include <gtest/gtest.h>

#include <lockstep/launch/signal_catcher.h>

namespace lockstep::launch::signal_catcher_test {
namespace {

TEST(SignalCatcher, TakesTheSameSignalTwiceAtOnceForOne) {
  const SignalCatcher signals;
  ::raise(SIGTERM);
  ::raise(SIGTERM);  // as timeout(1) does
  ::raise(SIGINT);
  EXPECT_EQ(signals.take(), SIGTERM);
  EXPECT_EQ(signals.take(), SIGINT);
  EXPECT_EQ(signals.take(), std::nullopt);
}

TEST(SignalCatcher, TellsTheSameSignalLater) {
  const SignalCatcher signals;
  ::raise(SIGTERM);
  EXPECT_EQ(signals.take(), SIGTERM);
  std::optional<int> later;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!later && std::chrono::steady_clock::now() < limit) {
    ::raise(SIGTERM);
    later = signals.take();
  }
  EXPECT_EQ(later, SIGTERM);
}

}  // namespace
}  // namespace lockstep::launch::signal_catcher_test
