#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <pthread.h>

#include <lockstep/observe/internal/last_words.h>

namespace lockstep::internal {
namespace {

constexpr int kChecks = 20'000;
constexpr long kNanosecondsBetween = 50'000;

// Read by signal handlers, so nothing but lock-free atomics and what stands still after the start.
std::atomic<int64_t> pending{0};
static_assert(std::atomic<int64_t>::is_always_lock_free);
std::array<struct sigaction, NSIG> before;

void wait_until_written() {
  const int error = errno;
  const timespec pause{0, kNanosecondsBetween};
  for (int i = 0; i < kChecks && pending.load(std::memory_order_acquire) > 0; ++i)
    ::nanosleep(&pause, nullptr);
  errno = error;
}

void on_signal(int signal, siginfo_t* info, void* /*context*/) {
  wait_until_written();
  // Whoever was here before comes next. A fault strikes again when this returns, with all that the kernel
  // tells of it; a signal that was sent must be sent again.
  ::sigaction(signal, &before[static_cast<size_t>(signal)], nullptr);
  if (info->si_code <= 0) std::raise(signal);
}

void install(int signal, bool only_over_default) {
  struct sigaction& current = before[static_cast<size_t>(signal)];
  if (::sigaction(signal, nullptr, &current) != 0) return;
  const bool has_plain_handler = (current.sa_flags & SA_SIGINFO) == 0;
  const bool is_default = has_plain_handler && current.sa_handler == SIG_DFL;
  const bool is_ignored = has_plain_handler && current.sa_handler == SIG_IGN;
  if (is_ignored || (only_over_default && !is_default)) return;
  struct sigaction ours {};
  ours.sa_sigaction = on_signal;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  ::sigaction(signal, &ours, nullptr);
}

}  // namespace

void wait_for_last_words() {
  static std::once_flag once;
  std::call_once(once, [] {
    // In a forked child the threads don't exist.
    ::pthread_atfork(nullptr, nullptr, [] { pending.store(0); });
    std::atexit(wait_until_written);
    for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT})
      install(signal, /*only_over_default=*/false);
    for (const int signal : {SIGTERM, SIGINT, SIGHUP}) install(signal, /*only_over_default=*/true);
  });
}

void add_pending_words(int64_t count) {
  pending.fetch_add(count, std::memory_order_acq_rel);
}

}  // namespace lockstep::internal
