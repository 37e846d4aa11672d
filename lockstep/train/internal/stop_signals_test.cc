#include <atomic>
#include <chrono>
#include <csignal>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include <lockstep/train/internal/stop_signals.h>

namespace lockstep::train::internal::stop_signals_test {
namespace {

TEST(StopSignals, OfAForkedChildEndItAndNotTheTraining) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer keeps signals back in a child that was forked beside threads";
#endif
  std::atomic<bool> is_too_late{false};
  {
    const train::internal::StopSignals stop({SIGTERM}, std::chrono::seconds(0), [&] { is_too_late = true; });
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::raise(SIGTERM);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
    EXPECT_EQ(stop.received(), 0);
  }
  EXPECT_FALSE(is_too_late);
}

}  // namespace
}  // namespace lockstep::train::internal::stop_signals_test
