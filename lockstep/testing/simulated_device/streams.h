#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

/// Streams and events of the simulated device.
namespace lockstep::testing::simulated {

/// A stream: functions that run one after another, in a thread of its own, or in the caller's where nothing
/// is ahead of them. Thread-safe; lives as long as the process.
class StreamQueue {
 public:
  /// Runs `function` after all that came before. It must not throw.
  void submit(std::function<void()> function);
  /// The same, at once and in the caller's thread when nothing is ahead. For functions that don't wait.
  void submit_or_run(std::function<void()> function);
  /// Runs `function` after all that came before; it is done when this returns. Throws what it throws.
  void run(const std::function<void()>& function);
  /// Whether everything that was submitted is done.
  bool idle();
  void synchronize();

 private:
  bool run_if_idle(const std::function<void()>& function);
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  int64_t submitted_ = 0;
  int64_t finished_ = 0;
  bool has_thread_ = false;
  bool running_in_caller_ = false;
};

/// One recording of an event: done when its stream gets there.
class Recording {
 public:
  void complete();
  void wait();
  bool done();
  std::chrono::steady_clock::time_point time();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::chrono::steady_clock::time_point time_;
};

/// An event: its latest recording, null before the first.
struct Event {
  explicit Event(bool timing) : timing(timing) {}
  std::mutex mutex;
  std::shared_ptr<Recording> latest;
  const bool timing;

  std::shared_ptr<Recording> recording() {
    std::lock_guard lock(mutex);
    return latest;
  }
};

/// The calling thread's current device; and its exchange. Throws c10::Error for an index that there is not.
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex index);

/// The calling thread's current stream of a device (index -1: of the current one), and its exchange.
c10::Stream current_stream_of(c10::DeviceIndex index);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream default_stream_of(c10::DeviceIndex index);
/// The streams of a device but the default one, in turn.
c10::Stream pool_stream_of(c10::DeviceIndex index);

StreamQueue& queue_of(const c10::Stream& stream);
StreamQueue& current_queue(c10::DeviceIndex index);
void synchronize_device(c10::DeviceIndex index);

}  // namespace lockstep::testing::simulated
