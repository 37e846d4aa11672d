#pragma once

#include <atomic>

#include <lockstep/base/process/fork_guard.h>

namespace lockstep {

/// One T for each process of a fork: in a child, the parent's T may be locked by a thread that does not exist
/// there, so the child gets a fresh one, at its first use. Never destroyed, for threads and tensors may
/// outlive main(). Make it static. Thread-safe, also while another thread forks.
template <class T>
class PerProcess {
 public:
  T& get() {
    Instance* instance = current_.load(std::memory_order_acquire);
    while (instance == nullptr || instance->fork_guard.in_forked_child()) {
      auto* fresh = new Instance;
      // Release: a thread that gets the pointer sees what it points to.
      if (current_.compare_exchange_strong(instance, fresh, std::memory_order_acq_rel)) return fresh->value;
      delete fresh;
    }
    return instance->value;
  }

 private:
  struct Instance {
    ForkGuard fork_guard;
    T value{};
  };
  std::atomic<Instance*> current_{nullptr};
};

}  // namespace lockstep
