#pragma once

#include <cstdint>
#include <functional>
#include <mutex>

#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/fsdp/internal/window_machine.h>

namespace lockstep::fsdp::internal {

/// The windows of a model's weights (WindowMachine), with the group's operations as the meetings of all ranks.
/// Thread-safe.
class WeightWindows {
 public:
  explicit WeightWindows(ProcessGroup group) : group_(std::move(group)) {}

  /// A reader for as long as it lives.
  class Reading {
   public:
    explicit Reading(WeightWindows& windows) : windows_(&windows) {
      const std::lock_guard lock(windows.mutex_);
      windows.machine_.begin_read();
    }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    ~Reading() {
      const std::lock_guard lock(windows_->mutex_);
      windows_->machine_.end_read();
    }

   private:
    WeightWindows* windows_;
  };

  /// Runs `body`, which writes this rank's rows, while no rank reads; when it returns, all ranks have written. Collective.
  /// When a body throws, all ranks throw, and the weights can't be used any more. Throws what operations of the group
  /// throw; when a rank was lost before any has written, the weights are as they were.
  void write(const std::function<void()>& body);

  uint64_t steps() const {
    const std::lock_guard lock(mutex_);
    return machine_.steps();
  }

 private:
  template <class Action>
  void change(Action&& action) {
    const std::lock_guard lock(mutex_);
    action(machine_);
  }
  /// A meeting of all ranks: how many of them say true.
  int meet(bool flag);

  const ProcessGroup group_;
  mutable std::mutex mutex_;
  WindowMachine machine_;
};

}  // namespace lockstep::fsdp::internal
