#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include <lockstep/base/deadline.h>
#include <lockstep/base/process/interrupt.h>

namespace lockstep::transport {

/// How long a waiter burns its core before it sleeps in the kernel. A wake-up costs 5 to 40 µs, a spin that
/// succeeds 0.1 µs; but a core that spins does not compute.
struct WaitPolicy {
  int spins = 0;   // rounds with a pause instruction
  int yields = 0;  // rounds with sched_yield, which lets another rank on this core run
  // Yields no more once others have had the core for long: it is busy with more than this job's ranks then,
  // and a sleeping thread is served before one that yields.
  bool gives_up_yielding = false;
};

/// The policy for `ranks` waiting ranks on `cores` cores. `background`: the waiter is a communication thread
/// beside a computing one, which never spins when the host is full.
WaitPolicy choose_wait_policy(int ranks, int cores, bool background);

/// The same for a wait for a short message from another host, which takes ten microseconds at the least, or for a rank of this
/// host that waits so.
WaitPolicy policy_between_hosts(const WaitPolicy& policy);

/// For waits that take much longer than a wake-up: a spin would be in vain.
inline constexpr WaitPolicy kLongWait{0, 5};

/// Where one waiter sleeps and its peers wake it. Lies in shared memory, one cache line; any number of
/// ringers, in any process.
///
/// No wake-up is lost: the waiter says that it sleeps, then looks at what it waits for; the ringer changes
/// what is waited for, then looks whether a thread sleeps. A sequentially consistent fence between the two
/// steps on either side makes sure that at least one sees the other.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> sleeping{0};

  /// Wakes the waiter if it sleeps. Call publish_fence() once between the change and the rings.
  void ring() {
    if (sleeping.load(std::memory_order_relaxed) != 0) ring_now();
  }
  void ring_now();
};
static_assert(sizeof(Doorbell) == 64);

inline void publish_fence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

namespace internal {
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}
/// Whether others have had the core for long.
bool yield();
void sleep_on(Doorbell& bell, uint32_t seen, const Deadline& deadline);
}  // namespace internal

/// Waits until `ready()` holds or the deadline has passed; returns the last ready(). `ready` must only read
/// atomics. `before_sleep()` runs before each sleep. Throws what an interrupt check throws
/// (base/process/interrupt.h), once it would sleep.
template <class Ready, class BeforeSleep>
bool wait_until(Doorbell& bell, const WaitPolicy& policy, const Deadline& deadline, Ready&& ready,
                BeforeSleep&& before_sleep) {
  for (int i = 0; i <= policy.spins; ++i) {
    if (ready()) return true;
    internal::pause();
  }
  for (int i = 0; i < policy.yields; ++i) {
    const bool for_long = internal::yield();
    if (ready()) return true;
    if (for_long && policy.gives_up_yielding) break;
  }
  while (!deadline.expired()) {
    before_sleep();
    const uint32_t seen = bell.rings.load(std::memory_order_relaxed);
    bell.sleeping.store(1, std::memory_order_relaxed);
    publish_fence();  // pairs with the ringer's
    const bool now = ready();
    if (!now) internal::sleep_on(bell, seen, deadline);
    bell.sleeping.store(0, std::memory_order_relaxed);
    if (now || ready()) return true;
    check_interrupts();
  }
  return ready();
}

template <class Ready>
bool wait_until(Doorbell& bell, const WaitPolicy& policy, const Deadline& deadline, Ready&& ready) {
  return wait_until(bell, policy, deadline, std::forward<Ready>(ready), [] {});
}

}  // namespace lockstep::transport
