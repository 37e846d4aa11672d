#include <sched.h>

#include <lockstep/base/cpu.h>

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

}  // namespace lockstep
