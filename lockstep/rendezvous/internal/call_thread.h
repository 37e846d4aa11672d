#pragma once

#include <functional>
#include <memory>

namespace lockstep::rendezvous_internal {

/// Makes calls one after the other, in a thread that is left behind in one that does not return: for call_by(). Thread-safe.
class CallThread {
 public:
  CallThread();
  CallThread(const CallThread&) = delete;
  CallThread& operator=(const CallThread&) = delete;
  /// Calls that have not begun are dropped.
  ~CallThread();

  /// `call` owns all that it uses.
  void start(std::function<void()> call);

 private:
  struct Queue;
  static void run(Queue& queue);

  const std::shared_ptr<Queue> queue_;
};

}  // namespace lockstep::rendezvous_internal
