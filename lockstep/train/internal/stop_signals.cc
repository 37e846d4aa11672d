#include <atomic>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/process/signal_of_child.h>
#include <lockstep/train/internal/stop_signals.h>

namespace lockstep::train::internal {
namespace {

// What the handler may touch: lock-free, and without a destructor.
std::atomic<bool> in_use{false};
std::atomic<int> first_signal{0};
std::atomic<int> notify_fd{-1};
std::atomic<pid_t> owner{0};
static_assert(std::atomic<int>::is_always_lock_free);

void write_one(int fd) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(fd, &one, sizeof one);
}

void on_signal(int signal) {
  if (leave_signal_to_child(owner.load(), signal)) return;  // whose eventfd is the same one
  const int error = errno;
  int none = 0;
  first_signal.compare_exchange_strong(none, signal);
  if (const int fd = notify_fd.load(); fd >= 0) write_one(fd);
  errno = error;
}

UniqueFd make_eventfd() {
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  TORCH_CHECK(fd.get() >= 0, "RobustLoop: no eventfd: ", std::strerror(errno));
  return fd;
}

}  // namespace

StopSignals::StopSignals(std::vector<int> signals, std::chrono::nanoseconds deadline,
                         std::function<void()> too_late)
    : came_(make_eventfd()), done_(make_eventfd()) {
  TORCH_CHECK(!in_use.exchange(true), "RobustLoop: another one runs in this process; run them one by one");
  first_signal = 0;
  owner = ::getpid();
  notify_fd = came_.get();
  try {
    watchdog_.start("lockstep-stop",
                    [this, deadline, too_late = std::move(too_late)] { watch(deadline, too_late); });
  } catch (...) {
    notify_fd = -1;
    in_use = false;
    throw;
  }
  for (const int signal : signals) {
    struct sigaction action {};
    action.sa_handler = &on_signal;
    action.sa_flags = SA_RESTART;
    struct sigaction former {};
    if (::sigaction(signal, &action, &former) == 0) former_.emplace_back(signal, former);
  }
}

StopSignals::~StopSignals() {
  for (const auto& [signal, former] : former_) ::sigaction(signal, &former, nullptr);
  notify_fd = -1;
  write_one(done_.get());
  watchdog_.join();
  in_use = false;
}

int StopSignals::received() const {
  return first_signal.load(std::memory_order_relaxed);
}

void StopSignals::watch(std::chrono::nanoseconds deadline, const std::function<void()>& too_late) {
  pollfd waits[] = {{done_.get(), POLLIN, 0}, {came_.get(), POLLIN, 0}};
  while (::poll(waits, 2, -1) < 0 && errno == EINTR) {
  }
  if (waits[0].revents != 0) return;
  const auto until = std::chrono::steady_clock::now() + deadline;
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    if (left.count() <= 0) break;
    if (::poll(waits, 1, static_cast<int>(left.count())) > 0) return;
  }
  too_late();
}

}  // namespace lockstep::train::internal
