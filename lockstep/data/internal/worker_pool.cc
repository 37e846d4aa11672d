#include <utility>

#include <ATen/Parallel.h>

#include <lockstep/data/internal/loading_scope.h>
#include <lockstep/data/internal/worker_pool.h>

// OpenMP's, found at run time in the runtime that LibTorch loaded, if it loaded one.
extern "C" __attribute__((weak)) void omp_set_num_threads(int threads);

namespace lockstep::data::internal {
namespace {

/// Operations of this thread stay on this thread, as in Python's workers. Without it, OpenMP would start a
/// second team of threads for it, which would compete with the training's.
void compute_alone() {
  at::get_num_threads();  // ATen's per-thread initialisation, which would undo the next line if it came later
  if (omp_set_num_threads != nullptr) omp_set_num_threads(1);
}

}  // namespace

WorkerPool::WorkerPool(int workers) : threads_(static_cast<size_t>(workers)) {
  try {
    for (int id = 0; id < workers; ++id) {
      threads_[static_cast<size_t>(id)].start("lockstep-loader", [this, id] { work(id); });
    }
  } catch (...) {  // the system gives no more threads
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    changed_->notify_all();
    for (auto& thread : threads_) thread.join();
    throw;
  }
}

WorkerPool::~WorkerPool() {
  if (fork_guard_.in_forked_child()) return;
  end(number_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
  }
  changed_->notify_all();
  for (auto& thread : threads_) thread.join();
}

int64_t WorkerPool::start(Job job) {
  end(number_);
  const std::lock_guard<std::mutex> lock(mutex_);
  job_ = std::make_shared<const Job>(std::move(job));
  busy_ = size();
  changed_->notify_all();
  return ++number_;
}

void WorkerPool::end(int64_t number) {
  if (fork_guard_.in_forked_child()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (number != number_ || job_ == nullptr) return;
  if (busy_ > 0) {
    const auto job = job_;
    lock.unlock();
    job->stop();
    lock.lock();
    changed_->wait(lock, [this] { return busy_ == 0; });
  }
  job_.reset();
}

void WorkerPool::work(int id) {
  compute_alone();
  Worker worker;
  worker.info.id = id;
  worker.info.num_workers = size();
  set_worker_info(&worker.info);
  for (int64_t done = 0;;) {
    std::shared_ptr<const Job> job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_->wait(lock, [&] { return over_ || number_ != done; });
      if (over_) return;
      done = number_;
      job = job_;
    }
    job->run(worker);
    job.reset();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--busy_ == 0) changed_->notify_all();
  }
}

}  // namespace lockstep::data::internal
