#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <pthread.h>

#include <lockstep/base/process/end_hook.h>
#include <lockstep/rendezvous/exit_status_table.h>
#include <lockstep/rendezvous/process_watch.h>
#include <lockstep/transport/host/process_header.h>

namespace lockstep::transport {
namespace {

constexpr uint32_t pack(EndKind kind, int code) {
  return static_cast<uint32_t>(kind) << 16 | (static_cast<uint32_t>(code) & 0xffff);
}

// Headers of this process; a fixed table of atomics because a signal handler reads it.
constexpr size_t kMaxHeaders = 64;
std::array<std::atomic<ProcessHeader*>, kMaxHeaders> headers;

void note_everywhere(EndKind kind, int code) {
  for (auto& slot : headers) {
    if (ProcessHeader* header = slot.load(std::memory_order_acquire)) leave_note(*header, kind, code);
  }
}

void on_crash(int signal) {
  note_everywhere(EndKind::kSignal, signal);
  // SA_RESETHAND has put the default action back: the process ends here as it would have without us.
  std::raise(signal);
}

void install_handlers() {
  ::on_exit([](int status, void*) { note_everywhere(EndKind::kExit, status & 0xff); }, nullptr);
  // A forked child is no rank: the headers tell of its parent, and are not mapped there.
  ::pthread_atfork(nullptr, nullptr, [] {
    for (auto& slot : headers) slot.store(nullptr, std::memory_order_relaxed);
  });
  // For signals that another of the library's handlers has taken already.
  before_default_end.store([](int signal) { note_everywhere(EndKind::kSignal, signal); },
                           std::memory_order_release);
  for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) {
    struct sigaction current {};
    if (::sigaction(signal, nullptr, &current) != 0 || current.sa_handler != SIG_DFL) continue;
    struct sigaction ours {};
    ours.sa_handler = on_crash;
    ours.sa_flags = SA_RESETHAND | SA_NODEFER | SA_ONSTACK;
    ::sigaction(signal, &ours, nullptr);
  }
}

}  // namespace

void leave_note(ProcessHeader& header, EndKind kind, int code) {
  uint32_t running = 0;
  header.note.compare_exchange_strong(running, pack(kind, code), std::memory_order_release,
                                      std::memory_order_relaxed);
}

EndKind note_kind(const ProcessHeader& header) {
  return static_cast<EndKind>(header.note.load(std::memory_order_acquire) >> 16);
}

void watch_process_end(ProcessHeader& header) {
  static std::once_flag once;
  std::call_once(once, install_handlers);
  for (auto& slot : headers) {
    ProcessHeader* empty = nullptr;
    if (slot.compare_exchange_strong(empty, &header, std::memory_order_release)) return;
  }
}

void unwatch_process_end(ProcessHeader& header) {
  for (auto& slot : headers) {
    ProcessHeader* ours = &header;
    if (slot.compare_exchange_strong(ours, nullptr, std::memory_order_acq_rel)) return;
  }
}

std::string describe_good_end() {
  // Not by operator+: gcc 12 warns of an overread within it that there is not.
  std::string text = "left the job in good order; it may have run out of data first (";
  text += kUnequalBatches;
  text += ')';
  return text;
}

std::string describe_process_end(const ProcessHeader& header, pid_t pid, int pidfd) {
  const uint32_t note = header.note.load(std::memory_order_acquire);
  const int code = static_cast<int>(note & 0xffff);
  switch (note_kind(header)) {
    case EndKind::kLeft:
      return describe_good_end();
    case EndKind::kSignal:
      return describe_wait_status(code);  // a wait status below 128 is the signal's number
    case EndKind::kExit:
      return describe_wait_status(code << 8);
    case EndKind::kRunning:
      break;
  }
  return known_end(pid, pidfd, std::chrono::milliseconds(50))
      .value_or("ended without a note (_exit(), SIGKILL, out of memory, or another signal)");
}

}  // namespace lockstep::transport
