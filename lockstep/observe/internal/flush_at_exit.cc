#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <pthread.h>

#include <lockstep/base/process/end_hook.h>
#include <lockstep/observe/internal/flush_at_exit.h>

namespace lockstep::observe::internal {
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

bool has_plain_handler(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0;
}

bool is_default(const struct sigaction& action) {
  return has_plain_handler(action) && action.sa_handler == SIG_DFL;
}

void on_signal(int signal, siginfo_t* info, void* /*context*/) {
  const struct sigaction& next = before[static_cast<size_t>(signal)];
  // First of all, because other ranks wait for what the hook tells them.
  if (is_default(next)) {
    if (const auto tell = before_default_end.load(std::memory_order_acquire)) tell(signal);
  }
  wait_until_written();
  // The handler that was here before comes next. A fault strikes again when this returns, with all that the
  // kernel tells of it; a signal that was sent, by a process or by a terminal, must be sent again.
  ::sigaction(signal, &next, nullptr);
  const bool strikes_again =
      info->si_code > 0 && (signal == SIGSEGV || signal == SIGBUS || signal == SIGILL || signal == SIGFPE);
  if (!strikes_again) std::raise(signal);
}

void install(int signal, bool only_over_default) {
  struct sigaction& current = before[static_cast<size_t>(signal)];
  if (::sigaction(signal, nullptr, &current) != 0) return;
  const bool is_ignored = has_plain_handler(current) && current.sa_handler == SIG_IGN;
  if (is_ignored || (only_over_default && !is_default(current))) return;
  struct sigaction ours {};
  ours.sa_sigaction = on_signal;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  ::sigaction(signal, &ours, nullptr);
}

}  // namespace

void flush_at_exit() {
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

void add_pending_records(int64_t count) {
  pending.fetch_add(count, std::memory_order_acq_rel);
}

}  // namespace lockstep::observe::internal
