#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

#include <lockstep/base/process/interrupt.h>

namespace lockstep::interrupt_test {
namespace {

struct Pressed final : std::runtime_error, Interruption {
  Pressed() : runtime_error("pressed") {}
};

int calls = 0;
void press() {
  ++calls;
  throw Pressed();
}

/// Installs a check for the length of a test.
struct Installed {
  explicit Installed(InterruptCheck check) {
    calls = 0;
    set_interrupt_check(check);
  }
  ~Installed() { set_interrupt_check(nullptr); }
};

TEST(Interrupt, WithoutACheckNothingIsAsked) {
  EXPECT_FALSE(has_interrupt_check());
  check_interrupts();
  const Installed installed(press);
  EXPECT_TRUE(has_interrupt_check());
  EXPECT_THROW(check_interrupts(), Interruption);
}

TEST(Interrupt, WaitsAreInterruptedWithTheLockHeldAgain) {
  const Installed installed(press);
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  EXPECT_THROW(wait_interruptibly(changed, lock), Pressed);
  EXPECT_TRUE(lock.owns_lock());
  EXPECT_EQ(calls, 1);
}

TEST(Interrupt, TheCheckRunsWithoutTheLock) {
  static std::mutex mutex;
  const Installed installed([] {
    std::thread([] { std::lock_guard lock(mutex); }).join();  // hangs if the waiter holds it
    throw Pressed();
  });
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  EXPECT_THROW(wait_interruptibly(changed, lock), Pressed);
}

TEST(Interrupt, WithoutACheckAWaitEndsAtItsDeadline) {
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  wait_interruptibly(changed, lock, Deadline::after(std::chrono::milliseconds(1)));
  EXPECT_TRUE(lock.owns_lock());
}

}  // namespace
}  // namespace lockstep::interrupt_test
