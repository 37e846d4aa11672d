#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>
#include <semaphore.h>
#include <utility>

#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/fork_guard.h>
#include <lockstep/flight/internal/signal_watcher.h>

namespace lockstep::flight::internal {
namespace {

/// What the handler touches: no destructor, so it is there at any time.
struct Mailbox {
  sem_t posted;
  std::atomic<bool> signalled;
  std::atomic<bool> stopping;
};
Mailbox mailbox;
[[maybe_unused]] const int made = ::sem_init(&mailbox.posted, 0, 0);
static_assert(std::atomic<bool>::is_always_lock_free);

void on_signal(int) {
  const int saved = errno;
  mailbox.signalled.store(true, std::memory_order_relaxed);
  ::sem_post(&mailbox.posted);
  errno = saved;
}

/// Never destroyed: the thread may still run when the process exits.
struct Thread {
  ForkGuard fork_guard;
  std::mutex mutex;
  BackgroundThread thread;
};
std::atomic<Thread*> current{nullptr};

/// This process's, not the one that a forked child inherited.
Thread* thread_of_process() {
  Thread* thread = current.load(std::memory_order_acquire);
  return thread != nullptr && thread->fork_guard.in_forked_child() ? nullptr : thread;
}

Thread& make_thread() {
  Thread* before = current.load(std::memory_order_acquire);
  if (Thread* thread = thread_of_process()) return *thread;
  auto* fresh = new Thread;
  if (current.compare_exchange_strong(before, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *before;
}

bool install_handler() {
  struct sigaction before {};
  ::sigaction(SIGUSR1, nullptr, &before);
  if ((before.sa_flags & SA_SIGINFO) != 0) return false;
  if (before.sa_handler == on_signal) return true;
  if (before.sa_handler != SIG_DFL) return false;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  return ::sigaction(SIGUSR1, &action, nullptr) == 0;
}

void serve(const SignalWatcher::Action& action) {
  while (true) {
    while (::sem_wait(&mailbox.posted) != 0) {
    }
    while (::sem_trywait(&mailbox.posted) == 0) {
    }
    // After the drain, which may have taken stop()'s post; a later one is still to be waited for.
    if (mailbox.stopping.load(std::memory_order_acquire)) return;
    action(mailbox.signalled.exchange(false, std::memory_order_relaxed));
  }
}

}  // namespace

bool SignalWatcher::start(Action action) {
  Thread& thread = make_thread();
  std::lock_guard lock(thread.mutex);
  if (thread.thread.running()) return true;
  if (!install_handler()) return false;
  mailbox.stopping.store(false, std::memory_order_release);
  mailbox.signalled.store(false, std::memory_order_relaxed);
  thread.thread.start("lockstep-flight", [action = std::move(action)] { serve(action); });
  return true;
}

void SignalWatcher::stop() {
  Thread* thread = thread_of_process();
  if (thread == nullptr) return;
  std::lock_guard lock(thread->mutex);
  if (!thread->thread.running()) return;
  mailbox.stopping.store(true, std::memory_order_release);
  ::sem_post(&mailbox.posted);
  thread->thread.join();
}

void SignalWatcher::wake() {
  if (thread_of_process() != nullptr) ::sem_post(&mailbox.posted);
}

}  // namespace lockstep::flight::internal
