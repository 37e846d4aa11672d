#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/per_process.h>
#include <lockstep/base/process/thread_cache.h>

namespace lockstep {
namespace {

constexpr auto kIdleTime = std::chrono::seconds(1);

class ThreadCache {
 public:
  void run(std::function<void()> task) {
    std::unique_lock lock(mutex_);
    if (!idle_.empty()) {
      Worker* worker = idle_.back();  // the one that rested least: others may reach the end of their time
      idle_.pop_back();
      worker->task = std::move(task);
      worker->called.notify_one();
      return;
    }
    ++count_;
    lock.unlock();
    try {
      // Moved, so that what the task holds goes with it and not with the thread.
      start_detached_thread("lockstep-comm",
                            [this, task = std::move(task)]() mutable { work(std::move(task)); });
    } catch (...) {
      lock.lock();
      --count_;
      throw;
    }
  }

  int count() {
    std::lock_guard lock(mutex_);
    return count_;
  }

 private:
  struct Worker {
    std::condition_variable called;
    std::function<void()> task;
  };

  void work(std::function<void()> task) {
    Worker worker;
    while (true) {
      task();
      task = nullptr;  // what it holds goes now, not when the next task comes
      std::unique_lock lock(mutex_);
      idle_.push_back(&worker);
      worker.called.wait_for(lock, kIdleTime, [&] { return worker.task != nullptr; });
      if (worker.task == nullptr) {
        std::erase(idle_, &worker);
        --count_;
        return;
      }
      task = std::exchange(worker.task, nullptr);
    }
  }

  std::mutex mutex_;
  std::vector<Worker*> idle_;
  int count_ = 0;
};

ThreadCache& thread_cache() {
  static PerProcess<ThreadCache> cache;
  return cache.get();
}

}  // namespace

void run_in_background(std::function<void()> task) {
  thread_cache().run(std::move(task));
}

int background_thread_count() {
  return thread_cache().count();
}

}  // namespace lockstep
