#include <lockstep/base/process/interrupt.h>

namespace lockstep {

std::atomic<InterruptCheck> detail::interrupt_check{nullptr};

void set_interrupt_check(InterruptCheck check) {
  detail::interrupt_check.store(check, std::memory_order_relaxed);
}

}  // namespace lockstep
