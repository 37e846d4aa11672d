#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <optional>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/process/signal_of_child.h>
#include <lockstep/launch/signal_catcher.h>

namespace lockstep::launch {
namespace {

constexpr std::array<int, 6> kSignals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

// Signal dispositions belong to the process, and so must what the handler reads. A pipe, once made, stays for
// the life of the process: a handler that runs in another thread may still write to one that was just given
// up.
struct Slot {
  std::atomic<int> write_end{-1};  // -1: no catcher listens
  bool taken = false;
  int pipe[2] = {-1, -1};
};
std::array<Slot, SignalCatcher::kMost> slots;
std::atomic<pid_t> owner{0};
std::mutex mutex;  // over everything but the write ends
int living = 0;
std::array<struct sigaction, kSignals.size()> former;
std::optional<struct sigaction> former_of_children;  // SIGCHLD's, where it was ignored

bool is_ignored(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_IGN;
}

void pass_on(int signal) {
  if (leave_signal_to_child(owner.load(), signal)) return;  // whose pipes are the same ones
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(signal);
  for (const Slot& slot : slots) {
    const int fd = slot.write_end.load(std::memory_order_acquire);
    if (fd < 0) continue;
    [[maybe_unused]] auto written = ::write(fd, &byte, 1);  // non-blocking; a full pipe holds enough signals
  }
  errno = saved;
}

}  // namespace

SignalCatcher::SignalCatcher() {
  std::lock_guard lock(mutex);
  for (int i = 0; i < kMost && slot_ < 0; ++i) {
    if (!slots[static_cast<size_t>(i)].taken) slot_ = i;
  }
  TORCH_CHECK(slot_ >= 0, "more than ", kMost, " launchers or spawn() calls at once in one process");
  Slot& slot = slots[static_cast<size_t>(slot_)];
  TORCH_CHECK_WITH(DistBackendError, slot.pipe[0] >= 0 || ::pipe2(slot.pipe, O_CLOEXEC | O_NONBLOCK) == 0,
                   "can't make a pipe: ", std::strerror(errno));
  slot.taken = true;
  while (take()) {  // left over from the former user
  }
  ended_by_ = 0;
  slot.write_end.store(slot.pipe[1], std::memory_order_release);
  if (living++ > 0) return;
  owner = ::getpid();
  struct sigaction ours = {};
  ours.sa_handler = pass_on;
  ours.sa_flags = SA_RESTART;
  ::sigfillset(&ours.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], nullptr, &former[i]);
    // SIGUSR1 and SIGUSR2 belong to programs; only where they would end this one, they are for the workers.
    const bool own = (kSignals[i] == SIGUSR1 || kSignals[i] == SIGUSR2) &&
                     ((former[i].sa_flags & SA_SIGINFO) != 0 || former[i].sa_handler != SIG_DFL);
    if (!is_ignored(former[i]) && !own) ::sigaction(kSignals[i], &ours, nullptr);
  }
  struct sigaction of_children = {};
  ::sigaction(SIGCHLD, nullptr, &of_children);
  if (is_ignored(of_children)) {
    former_of_children = of_children;
    of_children = {};  // SIG_DFL
    ::sigaction(SIGCHLD, &of_children, nullptr);
  }
}

SignalCatcher::~SignalCatcher() {
  std::lock_guard lock(mutex);
  if (--living == 0) {
    for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &former[i], nullptr);
    if (const auto ignored = std::exchange(former_of_children, std::nullopt)) {
      ::sigaction(SIGCHLD, &*ignored, nullptr);
    }
  }
  Slot& slot = slots[static_cast<size_t>(slot_)];
  slot.write_end.store(-1, std::memory_order_release);
  slot.taken = false;
}

int SignalCatcher::fd() const {
  return slots[static_cast<size_t>(slot_)].pipe[0];
}

std::optional<int> SignalCatcher::take() const {
  unsigned char byte = 0;
  while (true) {
    const ssize_t got = ::read(fd(), &byte, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got != 1) return std::nullopt;
    const auto now = std::chrono::steady_clock::now();
    if (ended_by_ != 0 && (byte == SIGHUP || (byte == ended_by_ && now - ended_at_ < kTwice))) continue;
    if (ended_by_ == 0 && byte != SIGUSR2) {
      ended_by_ = byte;
      ended_at_ = now;
    }
    return byte;
  }
}

}  // namespace lockstep::launch
