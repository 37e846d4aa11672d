#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace lockstep::testing {

/// All threads that call arrive() go on together, or get false after a minute.
class Meeting {
 public:
  explicit Meeting(int count) : missing_(count) {}
  bool arrive() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (--missing_ == 0) all_.notify_all();
    return all_.wait_for(lock, std::chrono::minutes(1), [this] { return missing_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int missing_;
};

}  // namespace lockstep::testing
