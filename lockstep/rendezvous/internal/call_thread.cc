#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include <lockstep/base/process/background_thread.h>
#include <lockstep/rendezvous/internal/call_thread.h>

namespace lockstep::rendezvous_internal {

struct CallThread::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> calls;
  bool ends = false;
};

CallThread::CallThread() : queue_(std::make_shared<Queue>()) {
  start_detached_thread("lockstep-store", [queue = queue_] { run(*queue); });
}

CallThread::~CallThread() {
  const std::lock_guard lock(queue_->mutex);
  queue_->ends = true;
  queue_->changed.notify_one();
}

void CallThread::start(std::function<void()> call) {
  const std::lock_guard lock(queue_->mutex);
  queue_->calls.push_back(std::move(call));
  queue_->changed.notify_one();
}

void CallThread::run(Queue& queue) {
  std::unique_lock lock(queue.mutex);
  while (true) {
    queue.changed.wait(lock, [&] { return queue.ends || !queue.calls.empty(); });
    if (queue.ends) return;
    std::function<void()> call = std::move(queue.calls.front());
    queue.calls.pop_front();
    lock.unlock();
    call();
    call = nullptr;
    lock.lock();
  }
}

}  // namespace lockstep::rendezvous_internal
