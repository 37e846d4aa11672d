#pragma once

#include <condition_variable>
#include <mutex>

namespace lockstep::testing {

/// A gate that holds threads (and streams, see enqueue()) back until a test opens it. It stays open. Copies
/// and moves are impossible; it outlives those that wait. Thread-safe.
class Gate {
 public:
  Gate() = default;
  /// Opens the gate, so that a test that fails half-way leaves no thread waiting.
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
    --waiting_;
    changed_.notify_all();
  }
  /// Returns when a thread waits at the closed gate, or it is open.
  void wait_for_arrival() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0 || open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int waiting_ = 0;
};

}  // namespace lockstep::testing
