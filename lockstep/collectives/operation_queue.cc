#include <utility>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/thread_cache.h>
#include <lockstep/collectives/operation_queue.h>

namespace lockstep {
namespace {

std::exception_ptr stopped_error() {
  return std::make_exception_ptr(c10::DistBackendError(
      {__func__, __FILE__, __LINE__}, "the process group was destroyed before this operation ran"));
}

}  // namespace

OperationWork::OperationWork(std::shared_ptr<OperationQueue> queue, int rank, c10d::OpType type,
                             const char* title, const std::vector<at::Tensor>& inputs,
                             std::vector<at::Tensor> outputs, std::function<void(bool)> body)
    : Work(rank, type, title, inputs),
      queue_(std::move(queue)),
      outputs_(std::move(outputs)),
      body_(std::move(body)) {}

bool OperationWork::isCompleted() {
  std::lock_guard lock(queue_->mutex_);
  if (!done_) queue_->start_thread();
  return done_;
}

bool OperationWork::isSuccess() const {
  std::lock_guard lock(queue_->mutex_);
  return done_ && !error_;
}

std::exception_ptr OperationWork::exception() const {
  std::lock_guard lock(queue_->mutex_);
  return error_;
}

float OperationWork::getDuration() const {
  std::lock_guard lock(queue_->mutex_);
  return std::chrono::duration<float, std::milli>(duration_).count();
}

bool OperationWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(queue_->mutex_);
  if (timeout == kNoTimeout) {
    while (!done_) {
      if (!queue_->running_ && !queue_->queue_.empty()) {
        queue_->run_head(lock, /*background=*/false);
      } else {
        queue_->changed_.wait(lock);
      }
    }
  } else {
    // Not inline, for an operation can't be left half-way when this wait's time is over.
    if (!done_) queue_->start_thread();
    const bool in_time = queue_->changed_.wait_for(lock, timeout, [this] { return done_; });
    if (!in_time) {
      LOCKSTEP_THROW_TIMEOUT("wait() gave up after " + std::to_string(timeout.count()) +
                             " ms; the operation itself goes on");
    }
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> OperationWork::getFuture() {
  std::unique_lock lock(queue_->mutex_);
  if (!done_) queue_->start_thread();
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    if (done_) {
      auto future = future_;
      auto error = error_;
      lock.unlock();
      error ? future->setError(error) : future->markCompleted(c10::IValue(outputs_));
      return future;
    }
  }
  return future_;
}

void OperationWork::run(bool background) {
  try {
    body_(background);
  } catch (...) {
    error_ = std::current_exception();
  }
}

OperationQueue::~OperationQueue() {
  if (!fork_guard_.in_forked_child()) stop();
}

void OperationQueue::submit(const c10::intrusive_ptr<OperationWork>& work, bool asynchronous,
                            const std::function<void(uint64_t number)>& numbered) {
  std::unique_lock lock(mutex_);
  if (stopped_) {
    work->error_ = stopped_error();
    work->done_ = true;
    return;
  }
  work->number_ = ++submitted_;
  numbered(work->number_);
  queue_.push_back(work);
  if (asynchronous) start_thread();
}

uint64_t OperationQueue::submitted() const {
  std::lock_guard lock(mutex_);
  return submitted_;
}

void OperationQueue::start_thread() {
  if (serving_ || queue_.empty()) return;
  run_in_background([self = shared_from_this()] { self->serve(); });
  serving_ = true;
}

void OperationQueue::run_head(std::unique_lock<std::mutex>& lock, bool background) {
  auto work = std::move(queue_.front());
  queue_.pop_front();
  running_ = true;
  lock.unlock();
  const auto start = std::chrono::steady_clock::now();
  work->run(background);
  auto body =
      std::exchange(work->body_, nullptr);  // may hold the last reference to tensors: not under the lock
  const auto duration = std::chrono::steady_clock::now() - start;
  body = nullptr;
  if (work->recordFunctionEndCallback_) work->recordFunctionEndCallback_();
  lock.lock();
  running_ = false;
  work->done_ = true;
  work->duration_ = duration;
  changed_.notify_all();
  if (auto future = work->future_) {
    lock.unlock();
    work->error_ ? future->setError(work->error_) : future->markCompleted(c10::IValue(work->outputs_));
    lock.lock();
  }
}

void OperationQueue::serve() {
  std::unique_lock lock(mutex_);
  while (!queue_.empty()) {
    if (running_) {
      changed_.wait(lock);
    } else {
      run_head(lock, /*background=*/true);
    }
  }
  serving_ = false;
  changed_.notify_all();
}

void OperationQueue::stop() {
  std::unique_lock lock(mutex_);
  while (running_ || !queue_.empty()) {
    if (!running_) {
      run_head(lock, /*background=*/false);
    } else {
      changed_.wait(lock);
    }
  }
  stopped_ = true;
  changed_.wait(lock, [this] { return !serving_; });
}

}  // namespace lockstep
