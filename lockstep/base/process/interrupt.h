#pragma once

#include <atomic>
#include <chrono>

#include <lockstep/base/deadline.h>

/// Lets the program that this library is part of end its waits: Python's signal handlers run only when a
/// thread asks for them, and a wait for a peer may take half an hour.
namespace lockstep {

/// What an interrupt check throws derives from this, beside a type of its own that its program knows. An
/// operation that it interrupts half-way fails on all ranks; what it throws reaches the caller that waited.
struct Interruption {
  virtual ~Interruption() = default;
};

/// Runs in any thread that waits, with no lock of ours held but, while a store is opened, that of the store's
/// entry: the check must not call init_process_group() or rendezvous(), which would wait for ever. Returns,
/// or throws an Interruption.
using InterruptCheck = void (*)();

/// One for the process; null for none, as at the start. Thread-safe.
void set_interrupt_check(InterruptCheck check);

namespace internal {
extern std::atomic<InterruptCheck> interrupt_check;
}  // namespace internal

inline bool has_interrupt_check() {
  return internal::interrupt_check.load(std::memory_order_relaxed) != nullptr;
}

/// Every wait calls it, at least every kInterruptInterval when there is a check.
inline void check_interrupts() {
  if (auto check = internal::interrupt_check.load(std::memory_order_relaxed)) check();
}

inline constexpr std::chrono::milliseconds kInterruptInterval{100};

/// condition_variable::wait_until() that can be interrupted, and may return early. `lock` is held again also
/// when it throws.
template <class Condition, class Lock>
void wait_interruptibly(Condition& changed, Lock& lock, const Deadline& deadline = Deadline::never()) {
  if (!has_interrupt_check()) {
    changed.wait_for(lock, deadline.remaining());
    return;
  }
  changed.wait_for(lock, deadline.remaining(kInterruptInterval));
  lock.unlock();
  struct Relock {
    Lock& lock;
    ~Relock() { lock.lock(); }
  } relock{lock};
  check_interrupts();
}

}  // namespace lockstep
