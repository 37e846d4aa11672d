#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/fork_guard.h>

namespace lockstep::checkpoint::internal {

/// A thread that does one task after the other, at most one at a time. When the process ends by exit() while
/// it works, the task is told to give up, and waited for, before static objects go. In a forked child there
/// is never a task. Not thread-safe: one owner.
class AsyncWriter {
 public:
  AsyncWriter();
  AsyncWriter(const AsyncWriter&) = delete;
  AsyncWriter& operator=(const AsyncWriter&) = delete;
  /// Waits for the task.
  ~AsyncWriter();

  /// Waits for the task before, then starts `task`, which must not throw.
  void start(std::function<void()> task);
  /// Waits for the task; nothing if there is none.
  void wait();
  /// Whether there is a task; true in a forked child, which can't tell.
  bool busy() const;
  /// True when the task should give up.
  const std::atomic<bool>& cancelled() const { return cancelled_; }

  /// For exit(): tells the task to give up, and waits some seconds for it.
  void cancel_at_exit();

 private:
  void run();

  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::function<void()> task;  // none: the thread is idle
    bool closing = false;
  };
  std::unique_ptr<State> state_ = std::make_unique<State>();
  std::atomic<bool> cancelled_ = false;
  ForkGuard fork_guard_;  // the thread and its task are not in a forked child
  BackgroundThread thread_;
};

}  // namespace lockstep::checkpoint::internal
