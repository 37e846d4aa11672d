#include <chrono>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#include <lockstep/transport/waiting.h>

namespace lockstep::transport {

WaitPolicy choose_wait_policy(int ranks, int cores, bool background) {
  if (background) {
    // The compute threads keep `ranks` cores busy; only cores beyond them may be burnt.
    return cores >= 2 * ranks ? WaitPolicy{200, 100, true} : WaitPolicy{0, 0};
  }
  // Spins cover an exchange between two cores (under 1 µs) and a rank that is a little late; about 15 µs.
  // Yields come soon, for with other load on the machine the awaited rank may be queued behind this very
  // waiter.
  if (ranks <= cores) return {200, 100, true};
  // More ranks than cores: the rank that is waited for needs this core.
  return {20, 200};
}

// Each round drives the wire, if this rank waits for it itself. A yield costs no more than that where no other thread wants
// the core; where one does, it may be the rank that is waited for.
WaitPolicy policy_between_hosts(const WaitPolicy& policy) {
  if (policy.yields == 0) return policy;
  return {10, 300, policy.gives_up_yielding};
}

void Doorbell::ring_now() {
  rings.fetch_add(1, std::memory_order_relaxed);
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&rings), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

namespace internal {

bool yield() {
  constexpr auto kLong = std::chrono::microseconds(200);
  const auto begin = std::chrono::steady_clock::now();
  ::sched_yield();
  return std::chrono::steady_clock::now() - begin > kLong;
}

void sleep_on(Doorbell& bell, uint32_t seen, const Deadline& deadline) {
  const auto left = deadline.remaining(has_interrupt_check() ? std::chrono::nanoseconds(kInterruptInterval)
                                                             : std::chrono::seconds(10));
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(left.count() / 1'000'000'000);
  timeout.tv_nsec = static_cast<long>(left.count() % 1'000'000'000);
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.rings), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

}  // namespace internal
}  // namespace lockstep::transport
