// Times the bare barrier of two processes, which nothing that synchronises them can undercut: each raises a
// flag of its own and spins until the other's is up. The flags are all that it has in common with Lockstep,
// so it says what the machine costs. As scripts/bench commands; by hand:
//
//     bench_flag_barrier barrier 0 1000 100
//
// An iteration's time is that of one of many barriers in a row. The two processes are bound to two cores:
// on one, each would spin for as long as the scheduler lets it.
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <iostream>
#include <new>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "command_loop.h"

namespace {

using lockstep::benchmarks::Command;
using lockstep::benchmarks::Timings;

constexpr int kRanks = 2;
constexpr int64_t kBarriersInARow = 1000;
constexpr int64_t kSpinsUntilGone = int64_t{1} << 30;  // ten seconds and more

// Two cache lines, since some processors fetch the neighbour along. Written by one rank, read by the other.
struct alignas(128) Flag {
  std::atomic<uint64_t> barriers{0};  // that the writer has come to
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class FlagBarrier {
 public:
  FlagBarrier(Flag* flags, int rank) : mine_(flags[rank]), theirs_(flags[1 - rank]) {}

  void wait() {
    mine_.barriers.store(++count_, std::memory_order_release);
    int64_t spins = 0;
    while (theirs_.barriers.load(std::memory_order_acquire) < count_) {
      pause();
      TORCH_CHECK(++spins < kSpinsUntilGone, "the other process has not come to the barrier; did it end?");
    }
  }

 private:
  Flag& mine_;
  Flag& theirs_;
  uint64_t count_ = 0;
};

Timings measure(FlagBarrier& barrier, const Command& command) {
  TORCH_CHECK_VALUE(command.operation == "barrier", "there is no operation '", command.operation,
                    "'; there is barrier");
  Timings timings;
  for (int64_t i = -command.warmup; i < command.iterations; ++i) {
    barrier.wait();
    const int64_t begin = lockstep::benchmarks::wall_clock();
    for (int64_t n = 0; n < kBarriersInARow; ++n) barrier.wait();
    const int64_t end = lockstep::benchmarks::wall_clock();
    if (i >= 0) timings.wall.push_back((end - begin) / kBarriersInARow);
  }
  return timings;
}

// Binds this process to the rank-th of the cores that it may use.
void bind_to_core(int rank) {
  cpu_set_t usable;
  TORCH_CHECK(::sched_getaffinity(0, sizeof usable, &usable) == 0,
              "cannot read the usable cores: ", std::strerror(errno));
  TORCH_CHECK(CPU_COUNT(&usable) >= kRanks, "the flag barrier needs two cores, and this process may use ",
              CPU_COUNT(&usable), "; give it more, or leave it out");
  int core = 0;
  for (int skip = rank; !CPU_ISSET(core, &usable) || skip-- > 0;) ++core;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  TORCH_CHECK(::sched_setaffinity(0, sizeof one, &one) == 0, "cannot bind to core ", core, ": ",
              std::strerror(errno));
}

int run_rank(int argc, char** argv, Flag* flags, int rank) {
  return lockstep::benchmarks::run([&] {
    bind_to_core(rank);
    FlagBarrier barrier(flags, rank);
    return lockstep::benchmarks::serve(argc, argv, rank,
                                       [&](const Command& command) { return measure(barrier, command); });
  });
}

}  // namespace

int main(int argc, char** argv) {
  void* memory =
      ::mmap(nullptr, kRanks * sizeof(Flag), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::cerr << "cannot map memory for two flags: " << std::strerror(errno) << std::endl;
    return 1;
  }
  Flag* flags = new (memory) Flag[kRanks];
  const pid_t parent = ::getpid(), child = ::fork();
  if (child < 0) {
    std::cerr << "cannot start the second process: " << std::strerror(errno) << std::endl;
    return 1;
  }
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) return 1;  // it died before that
    return run_rank(argc, argv, flags, 1);
  }
  const int status = run_rank(argc, argv, flags, 0);
  if (status != 0) return status;  // which ends the other process
  int others = 0;
  ::waitpid(child, &others, 0);
  return WIFEXITED(others) ? WEXITSTATUS(others) : 1;
}
