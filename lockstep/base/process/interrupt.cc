#include <lockstep/base/process/interrupt.h>

namespace lockstep {

std::atomic<InterruptCheck> internal::interrupt_check{nullptr};

void set_interrupt_check(InterruptCheck check) {
  internal::interrupt_check.store(check, std::memory_order_relaxed);
}

}  // namespace lockstep
