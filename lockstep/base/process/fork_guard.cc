#include <atomic>
#include <pthread.h>

#include <lockstep/base/process/fork_guard.h>

namespace lockstep {
namespace {

std::atomic<uint64_t> fork_generation{0};

void count_fork_in_child() {
  fork_generation.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

ForkGuard::ForkGuard() {
  [[maybe_unused]] static const int registered = ::pthread_atfork(nullptr, nullptr, count_fork_in_child);
  generation_ = fork_generation.load(std::memory_order_relaxed);
}

bool ForkGuard::in_forked_child() const {
  return fork_generation.load(std::memory_order_relaxed) != generation_;
}

}  // namespace lockstep
