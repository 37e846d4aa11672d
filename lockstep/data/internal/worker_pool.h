#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/process/leaked_in_child.h>
#include <lockstep/data/worker_info.h>

namespace lockstep::data::internal {

/// A loading thread, as its job sees it.
struct Worker {
  WorkerInfo info;
  bool prepared = false;  // the user's worker_init_fn has run in this thread
};

/// The loading threads of a loader, or of one epoch. They do one job after the other: an epoch.
///
/// start() and end() belong to one thread at a time. What was written before start() happens before the job
/// runs in any worker, and what the workers write happens before end() returns: both go through mutex_.
class WorkerPool {
 public:
  struct Job {
    std::function<void(Worker&)> run;  // in every worker; must not throw
    std::function<void()> stop;        // makes each run() return soon
  };

  explicit WorkerPool(int workers);
  /// Stops the job and joins the threads. In a forked child, where there are none, does nothing.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }

  /// Ends the job before and gives all workers this one. Returns its number.
  int64_t start(Job job);
  /// Stops the job of that number and waits until no worker is in it. Nothing if another one has begun since.
  void end(int64_t number);

 private:
  void work(int id);

  ForkGuard fork_guard_;
  std::mutex mutex_;
  LeakedInChild<std::condition_variable> changed_;
  std::shared_ptr<const Job> job_;  // guarded by mutex_, as all below
  int64_t number_ = 0;              // of the latest job; 0: none yet
  int busy_ = 0;                    // workers that have not returned from it
  bool over_ = false;               // the threads shall end
  std::vector<BackgroundThread> threads_;
};

}  // namespace lockstep::data::internal
