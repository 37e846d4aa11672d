#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/fsdp/internal/window_machine.h>

namespace lockstep::fsdp::internal {

/// How many ranks of the group say true. Collective.
int count_ranks(const ProcessGroup& group, bool flag);
/// Runs `action` on each rank of the group. When it throws on some, all throw: these their own error, the others a
/// c10::DistBackendError that says how many have failed at `what`. Collective.
void run_on_all(const ProcessGroup& group, const char* what, const std::function<void()>& action);

/// The windows of a model's weights (WindowMachine), with the group's operations as the meetings of all ranks. Threads of a
/// process wait for each other: one that reads for one that writes, and the other way round. Thread-safe.
///
/// Where one thread uses the model, autograd's threads may read on its behalf: those never wait, and what would have to is an
/// error.
class WeightWindows {
 public:
  explicit WeightWindows(ProcessGroup group, bool one_thread = false)
      : group_(std::move(group)), one_thread_(one_thread) {}

  /// A reader for as long as it lives.
  class Reading {
   public:
    explicit Reading(WeightWindows& windows) : windows_(windows), thread_(std::this_thread::get_id()) {
      windows_.begin_read(thread_);
    }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    ~Reading() { windows_.end_read(thread_); }

   private:
    WeightWindows& windows_;
    const std::thread::id thread_;
  };

  /// Runs `body`, which writes this rank's rows, while no rank reads; when it returns, all ranks have written. Collective.
  /// `check` runs before; when it throws on any rank, or this thread reads, all ranks throw, and the weights are as they were.
  /// When a body throws, all ranks throw, and the weights can't be used any more. Throws what operations of the group
  /// throw; when a rank was lost before any has written, the weights are as they were.
  void write(const std::function<void()>& check, const std::function<void()>& body);

 private:
  void begin_read(std::thread::id thread);
  void end_read(std::thread::id thread);
  int readers_of(std::thread::id thread) const;
  void enter();
  void leave();
  /// A meeting of all ranks: how many of them say true.
  int meet(bool flag);
  template <class Action>
  void change(Action&& action) {
    const std::lock_guard lock(mutex_);
    action(machine_);
  }

  const ProcessGroup group_;
  const bool one_thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  WindowMachine machine_;
  std::map<std::thread::id, int> readers_;  // by thread; all together are the machine's
  std::thread::id writer_;                  // none while there is none
};

}  // namespace lockstep::fsdp::internal
