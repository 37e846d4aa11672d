#include <chrono>
#include <sched.h>

#include <lockstep/base/process/cpu.h>

namespace lockstep {

int usable_cores() {
  // A mask of the usual size is refused on machines with more cores.
  for (int possible = CPU_SETSIZE; possible <= (1 << 20); possible *= 2) {
    cpu_set_t* mask = CPU_ALLOC(static_cast<size_t>(possible));
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(possible));
    const int count = ::sched_getaffinity(0, bytes, mask) == 0 ? CPU_COUNT_S(bytes, mask) : 0;
    CPU_FREE(mask);
    if (count > 0) return count;
  }
  return 1;
}

int current_cpu() {
  const int cpu = ::sched_getcpu();
  return cpu < 0 ? 0 : cpu;
}

void move_to_another_cpu() {
  constexpr auto kPause = std::chrono::milliseconds(100);
  using Clock = std::chrono::steady_clock;
  thread_local Clock::time_point next{};
  const auto now = Clock::now();
  if (now < next) return;
  next = now + kPause;
  cpu_set_t mask;  // on machines with more than 1024 CPUs this fails, and nothing is done
  if (::sched_getaffinity(0, sizeof mask, &mask) != 0 || CPU_COUNT(&mask) < 2) return;
  cpu_set_t others = mask;
  CPU_CLR(current_cpu(), &others);
  if (::sched_setaffinity(0, sizeof others, &others) == 0) ::sched_setaffinity(0, sizeof mask, &mask);
}

}  // namespace lockstep
