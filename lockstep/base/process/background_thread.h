#pragma once

#include <functional>
#include <thread>

#include <lockstep/base/process/fork_guard.h>

namespace lockstep {

/// A thread of the library's own beside the program's. Takes no signals (they are the program's business),
/// has a name in debuggers and top, and copes with fork(): in the child the thread does not exist, and is not
/// joined. Not thread-safe itself.
class BackgroundThread {
 public:
  BackgroundThread() = default;
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;
  /// Must have been joined, except in a forked child.
  ~BackgroundThread();

  /// `name`: at most 15 characters.
  void start(const char* name, std::function<void()> body);
  bool running() const { return thread_.joinable(); }
  /// Waits for the body to return; nothing if it was never started.
  void join();

 private:
  ForkGuard fork_guard_;
  std::thread thread_;
};

/// Starts a thread that is not joined, otherwise like BackgroundThread.
void start_detached_thread(const char* name, std::function<void()> body);

}  // namespace lockstep
