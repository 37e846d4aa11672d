#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/per_process.h>
#include <lockstep/base/process/thread_cache.h>

namespace lockstep {
namespace {

constexpr auto kIdleTime = std::chrono::seconds(1);

class ThreadCache {
 public:
  bool run(std::function<void()> task) {
    std::unique_lock lock(mutex_);
    if (!idle_.empty()) {
      Worker* worker = idle_.back();  // the one that rested least: others may reach the end of their time
      idle_.pop_back();
      worker->task = std::move(task);
      worker->called.notify_one();
      return true;
    }
    ++count_;
    lock.unlock();
    try {
      if (const int error = failpoint::fails_with("start_thread")) {
        throw std::system_error(error, std::generic_category());
      }
      // Moved, so that what the task holds goes with it and not with the thread.
      start_detached_thread("lockstep-comm",
                            [this, task = std::move(task)]() mutable { work(std::move(task)); });
    } catch (const std::exception& error) {
      lock.lock();
      --count_;
      if (!std::exchange(warned_, true)) {
        LOCKSTEP_LOG(kWarning)
            << "the system gives no thread for operations in the background: " << error.what()
            << "; they and the callbacks of futures run in the threads that start or await "
               "them (see ulimit -u, and pids.max of the control group)";
      }
      return false;
    }
    return true;
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
  bool warned_ = false;
};

ThreadCache& thread_cache() {
  static PerProcess<ThreadCache> cache;
  return cache.get();
}

}  // namespace

bool run_in_background(std::function<void()> task) {
  return thread_cache().run(std::move(task));
}

int background_thread_count() {
  return thread_cache().count();
}

}  // namespace lockstep
