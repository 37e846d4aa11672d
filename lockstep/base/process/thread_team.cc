#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>

#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/thread_team.h>
#include <lockstep/base/rethrow_with_context.h>

// OpenMP's, found at run time in the runtime that LibTorch loaded, if it loaded one.
extern "C" __attribute__((weak)) void omp_set_num_threads(int threads);

namespace lockstep {

struct ThreadTeam::Members {
  /// What one run() wants of the threads.
  struct Job {
    int count;
    const std::function<void(int)>& work;
    at::ThreadLocalState state;
    int intra_op_threads;
    std::vector<std::exception_ptr> failures;
  };

  Members(int count, const char* name) : threads(static_cast<size_t>(count)) {
    try {
      for (int i = 0; i < count; ++i) {
        threads[static_cast<size_t>(i)].start(name, [this, i] { serve(i); });
      }
    } catch (...) {  // the system gives no more threads
      end();
      throw;
    }
  }

  ~Members() { end(); }

  void end() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stop = true;
    }
    posted.notify_all();
    for (auto& thread : threads) thread.join();
  }

  void serve(int index) {
    at::get_num_threads();  // ATen's per-thread initialisation, which would undo what is set later
    uint64_t done = 0;
    for (;;) {
      Job* mine = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex);
        posted.wait(lock, [&] { return stop || (jobs != done && job != nullptr && index < job->count); });
        if (stop) return;
        done = jobs;
        mine = job;
      }
      if (omp_set_num_threads != nullptr) omp_set_num_threads(mine->intra_op_threads);
      try {
        const at::ThreadLocalStateGuard guard(mine->state);
        mine->work(index);
      } catch (...) {
        mine->failures[static_cast<size_t>(index)] = std::current_exception();
      }
      const std::lock_guard<std::mutex> lock(mutex);
      if (--running == 0) finished.notify_one();
    }
  }

  void run(Job& posted_job) {
    const std::lock_guard<std::mutex> one_run(run_mutex);
    std::unique_lock<std::mutex> lock(mutex);
    job = &posted_job;
    running = posted_job.count;
    ++jobs;
    posted.notify_all();
    finished.wait(lock, [this] { return running == 0; });
    job = nullptr;
  }

  std::mutex run_mutex;
  std::mutex mutex;  // guards all below
  std::condition_variable posted;
  std::condition_variable finished;
  Job* job = nullptr;
  uint64_t jobs = 0;  // how many were posted
  int running = 0;
  bool stop = false;
  std::deque<BackgroundThread> threads;
};

ThreadTeam::ThreadTeam(int count, const char* name)
    : count_(count), name_(name), members_(std::make_unique<Members>(count, name)) {}

ThreadTeam::~ThreadTeam() {
  if (fork_guard_.in_forked_child()) (void)members_.release();  // its threads are the parent's
}

void ThreadTeam::run(int count, const std::function<void(int)>& work,
                     const std::function<std::string(int)>& where) {
  if (fork_guard_.in_forked_child()) {
    (void)members_.release();
    members_ = std::make_unique<Members>(count_, name_);
    fork_guard_ = ForkGuard();
  }
  Members::Job job{count, work, at::ThreadLocalState(), std::max(1, at::get_num_threads() / count),
                   std::vector<std::exception_ptr>(static_cast<size_t>(count))};
  members_->run(job);
  for (int i = 0; i < count; ++i) {
    if (!job.failures[static_cast<size_t>(i)]) continue;
    try {
      std::rethrow_exception(std::move(job.failures[static_cast<size_t>(i)]));
    } catch (...) {
      rethrow_with_context(where(i));
    }
  }
}

}  // namespace lockstep
