#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include <lockstep/base/process/per_process.h>

namespace lockstep::profiler::internal {

/// Where a callback of RecordFunction, which is a plain function, finds the log that it writes to. A forked child, which
/// inherits the callback, finds none. Make it static. Thread-safe.
template <class Log>
class CurrentLog {
 public:
  /// Null: no log from now on.
  void set(std::shared_ptr<Log> log) {
    Guarded& current = current_.get();
    const std::lock_guard lock(current.mutex);
    current.log = std::move(log);
  }
  std::shared_ptr<Log> get() {
    Guarded& current = current_.get();
    const std::lock_guard lock(current.mutex);
    return current.log;
  }
  /// Calls `action` with the log, if there is one, which nothing else uses meanwhile.
  template <class Action>
  void use(Action&& action) {
    Guarded& current = current_.get();
    const std::lock_guard lock(current.mutex);
    if (current.log) action(*current.log);
  }

 private:
  struct Guarded {
    std::mutex mutex;
    std::shared_ptr<Log> log;  // guarded by mutex
  };
  PerProcess<Guarded> current_;
};

}  // namespace lockstep::profiler::internal
