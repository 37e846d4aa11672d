#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/errors.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/base/process/thread_cache.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/collectives/backend/internal/device_copies.h>
#include <lockstep/collectives/backend/internal/operation_queue.h>
#include <lockstep/collectives/backend/internal/planned_operation.h>

namespace lockstep::collectives::internal {
namespace {

/// Whose future's callbacks this thread runs, or destroys.
thread_local const OperationQueue* telling_here = nullptr;

class TellingHere {
 public:
  explicit TellingHere(const OperationQueue* queue) : before_(std::exchange(telling_here, queue)) {}
  TellingHere(const TellingHere&) = delete;
  TellingHere& operator=(const TellingHere&) = delete;
  ~TellingHere() { telling_here = before_; }

 private:
  const OperationQueue* before_;
};

std::exception_ptr stopped_error() {
  return std::make_exception_ptr(c10::DistBackendError(
      {__func__, __FILE__, __LINE__}, "the process group was destroyed before this operation ran"));
}

}  // namespace

OperationWork::OperationWork(std::shared_ptr<OperationQueue> queue, int rank, const char* title,
                             const PlannedOperation& operation, std::function<void(bool)> body)
    : Work(rank, operation.type),
      queue_(std::move(queue)),
      outputs_(operation.outputs),
      future_form_(operation.future_form),
      device_results_(operation.operands ? operation.operands->device_results() : nullptr),
      body_(std::move(body)),
      profiled_(title, operation.inputs) {}

c10::IValue OperationWork::future_value() const {
  if (future_form_.stacked) {
    const at::NoGradGuard no_grad;
    return std::vector<at::Tensor>{at::stack(outputs_)};
  }
  if (future_form_.lists == 1) return outputs_;
  std::vector<std::vector<at::Tensor>> lists(future_form_.lists);
  const size_t length = outputs_.size() / lists.size();
  for (size_t i = 0; i < outputs_.size(); ++i) lists[i / length].push_back(outputs_[i]);
  return lists;
}

bool OperationWork::isCompleted() {
  std::unique_lock lock(queue_->mutex_);
  if (!done_) queue_->run_beside(lock);
  return done_ && (!device_results_ || device_results_->arrived());
}

bool OperationWork::isSuccess() const {
  std::lock_guard lock(queue_->mutex_);
  return done_ && !error_;
}

std::exception_ptr OperationWork::exception() const {
  std::lock_guard lock(queue_->mutex_);
  return done_ ? error_ : nullptr;  // before that the thread that runs it may write it
}

float OperationWork::getDuration() const {
  std::lock_guard lock(queue_->mutex_);
  return std::chrono::duration<float, std::milli>(duration_).count();
}

bool OperationWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(queue_->mutex_);
  std::optional<WaitingPhase> waiting;
  if (!done_) waiting.emplace();
  if (timeout == kNoTimeout) {
    while (!done_) {
      if (!queue_->running_ && !queue_->queue_.empty()) {
        if (auto interruption = queue_->run_head(lock, /*serving=*/nullptr)) {
          std::rethrow_exception(interruption);
        }
      } else {
        wait_interruptibly(queue_->changed_, lock);
      }
    }
  } else {
    // Not inline, for an operation can't be left half-way when this wait's time is over.
    if (!done_) queue_->run_beside(lock);
    const Deadline deadline = Deadline::after(timeout);
    while (!done_ && !deadline.expired()) wait_interruptibly(queue_->changed_, lock, deadline);
    if (!done_) {
      LOCKSTEP_THROW_TIMEOUT("wait() gave up after " + std::to_string(timeout.count()) +
                             " ms; the operation itself goes on");
    }
  }
  if (error_) std::rethrow_exception(error_);
  lock.unlock();
  if (device_results_) device_results_->order_current_stream();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> OperationWork::getFuture() {
  std::unique_lock lock(queue_->mutex_);
  if (!done_) queue_->run_beside(lock);
  if (!future_) {
    std::vector<c10::Device> devices;
    if (device_results_) devices.push_back(device_results_->device());
    const c10::TypePtr list = c10::ListType::ofTensors();
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        future_form_.lists == 1 ? list : c10::ListType::create(list), std::move(devices));
    if (done_) {
      auto future = future_;
      auto error = error_;
      lock.unlock();
      complete(*future, error);
      return future;
    }
  }
  return future_;
}

std::exception_ptr OperationWork::run(bool background) {
  try {
    body_(background);
  } catch (const InterruptedAfterSuccess& interrupted) {
    return interrupted.interruption;
  } catch (const Interruption&) {
    error_ = std::make_exception_ptr(c10::DistBackendError(
        {__func__, __FILE__, __LINE__}, "this operation was interrupted half-way by a signal on this rank"));
    return std::current_exception();
  } catch (...) {
    error_ = std::current_exception();
  }
  return nullptr;
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
  if (asynchronous) run_beside(lock);
}

bool OperationQueue::busy() const {
  std::lock_guard lock(mutex_);
  return running_ || !queue_.empty();
}

uint64_t OperationQueue::submitted() const {
  std::lock_guard lock(mutex_);
  return submitted_;
}

bool OperationQueue::start_thread() {
  if (serving_ || queue_.empty()) return true;
  serving_ = run_in_background([self = shared_from_this()] { self->serve(); });
  return serving_;
}

/// An error here would leave an operation in the queue that runs later.
void OperationQueue::run_beside(std::unique_lock<std::mutex>& lock) {
  if (start_thread()) return;
  if (const auto interruption = run_or_await_all(lock)) std::rethrow_exception(interruption);
}

std::exception_ptr OperationQueue::run_head(std::unique_lock<std::mutex>& lock, bool* serving) {
  auto work = std::move(queue_.front());
  queue_.pop_front();
  running_ = true;
  lock.unlock();
  std::optional<WorkRecord::Bar> bar(std::in_place, work->profiled_);
  const auto start = std::chrono::steady_clock::now();
  const std::exception_ptr interruption = work->run(/*background=*/serving != nullptr);
  auto body = std::exchange(work->body_, nullptr);  // may hold the last reference to tensors: see the mutex
  const auto duration = std::chrono::steady_clock::now() - start;
  body = nullptr;
  bar.reset();
  lock.lock();
  running_ = false;
  work->done_ = true;
  work->duration_ = duration;
  changed_.notify_all();
  std::optional<TellingHere> here;
  if (serving != nullptr && work->future_) here.emplace(this);
  if (work->future_) tell_future(lock, work, serving);
  lock.unlock();
  work = nullptr;  // may be the last reference to tensors, too
  lock.lock();
  return interruption;
}

/// Runs the callbacks of an operation's future, which may wait: for further operations, or for what a user's
/// thread does after this wait. So not in such a thread; and a communication thread does not serve meanwhile.
void OperationQueue::tell_future(std::unique_lock<std::mutex>& lock,
                                 const c10::intrusive_ptr<OperationWork>& work, bool* serving) {
  if (serving == nullptr) {
    const bool started = run_in_background(
        [self = shared_from_this(), work = c10::intrusive_ptr<OperationWork>(work)]() mutable {
          {
            const TellingHere here(self.get());
            work->tell();
            work = nullptr;
          }
          std::lock_guard lock(self->mutex_);
          --self->telling_;
          self->changed_.notify_all();
        });
    if (started) {
      ++telling_;  // it waits for the lock
    } else {
      lock.unlock();
      const TellingHere here(this);
      work->tell();
      lock.lock();
    }
    return;
  }
  ++telling_;
  serving_ = false;
  if (!start_thread()) run_or_await_all(lock);  // first, for callbacks may wait for what stands there
  lock.unlock();
  work->tell();
  lock.lock();
  --telling_;
  *serving = !serving_;
  serving_ = true;
  changed_.notify_all();
}

void OperationWork::tell() const {
  complete(*future_, error_);
}

bool OperationQueue::is_telling_here() const {
  return telling_here == this;
}

void OperationWork::complete(c10::ivalue::Future& future, const std::exception_ptr& error) const {
  if (error) return future.setError(error);
  if (device_results_) return device_results_->complete(future, [this] { return future_value(); });
  c10::IValue value;
  try {
    value = future_value();
  } catch (...) {  // of an all_gather it is another tensor, for which there may be no memory
    return future.setError(std::current_exception());
  }
  future.markCompleted(std::move(value));
}

void OperationQueue::serve() {
  std::unique_lock lock(mutex_);
  bool serving = true;
  while (serving && !queue_.empty()) {
    if (running_) {
      changed_.wait(lock);
    } else {
      run_head(lock, &serving);
    }
  }
  if (!serving) return;
  serving_ = false;
  changed_.notify_all();
}

/// Returns the first interruption of an operation that this thread ran.
std::exception_ptr OperationQueue::run_or_await_all(std::unique_lock<std::mutex>& lock) {
  std::exception_ptr first;
  while (running_ || !queue_.empty()) {
    if (!running_) {
      auto interruption = run_head(lock, /*serving=*/nullptr);
      if (!first) first = interruption;
    } else {
      changed_.wait(lock);
    }
  }
  return first;
}

void OperationQueue::finish() {
  std::unique_lock lock(mutex_);
  if (const auto interruption = run_or_await_all(lock)) std::rethrow_exception(interruption);
}

void OperationQueue::stop() {
  std::unique_lock lock(mutex_);
  run_or_await_all(lock);
  stopped_ = true;
  changed_.wait(lock, [this] { return !serving_ && telling_ == 0; });
}

}  // namespace lockstep::collectives::internal
